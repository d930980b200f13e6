"""Settings of a controller process."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from stream_fabric.process.settings import EmitSettings, MetricsSettings, SettingsConflict

_SCALER_FILES = ("scaler_cert", "scaler_key", "scaler_client_ca")


class ControllerSettings(EmitSettings, MetricsSettings):
    pools_file: Path | None = Field(None, description="TOML file with the scaling policy of each pool to plan")
    telemetry_url: str = Field(
        "",
        pattern=r"^(https?://[^\s/?#@]+/?)?$",
        description="With pools_file: URL of stream-gw telemetry, to learn usual arrivals from; empty: none",
    )
    telemetry_token: SecretStr = Field(SecretStr(""), description="With telemetry_url: its bearer token")
    reconcile_hour: int = Field(
        3,
        ge=-1,
        le=23,
        description="With pools_file and telemetry_url: hour (UTC) of the nightly reconciliation of usage; -1: none",
    )
    pod_deletion_cost: bool = Field(
        False,
        description="With pools_file, in Kubernetes: mark the pod that may go with a deletion cost; needs the rights "
        "to list and patch pods",
    )
    pod_account: Path = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        description="With pod_deletion_cost: folder of the pod's service account, with token, ca.crt and namespace",
    )
    pod_selector: str = Field(
        "",
        description="With pod_deletion_cost: label selector of the install's agents; the deletion cost -1000 is "
        "removed from those that should not go. Empty: from any pod of the namespace",
    )
    drain_stuck: bool = Field(
        True, description="Drain a ready replica whose requests wait far longer than those of its peers"
    )
    stuck_ratio: float = Field(
        3.0,
        ge=1.5,
        le=100,
        description="With drain_stuck: drain above this multiple of the pool's median p99 queue time and above 1 s",
    )
    scaler_port: int = Field(
        -1,
        ge=-1,
        le=65535,
        description="With pools_file: gRPC port of the external scaler for KEDA's trigger external-push; 0: any "
        "free port, -1: none",
    )
    scaler_host: str = Field(
        "127.0.0.1",
        description="Address that scaler_port listens on; any other than loopback needs the three files below",
    )
    scaler_cert: Path | None = Field(None, description="With scaler_port: TLS certificate of the scaler, PEM")
    scaler_key: Path | None = Field(None, description="With scaler_cert: its private key, PEM, without a passphrase")
    scaler_client_ca: Path | None = Field(
        None, description="With scaler_cert: CA certificates, PEM; only clients with a certificate of them are answered"
    )

    @model_validator(mode="after")
    def _check_scaler(self) -> Self:
        files = (self.scaler_cert, self.scaler_key, self.scaler_client_ca)
        if len({path is None for path in files}) > 1:
            raise SettingsConflict(
                "set all or none of STREAM_GW_SCALER_CERT, STREAM_GW_SCALER_KEY and STREAM_GW_SCALER_CLIENT_CA",
                *_SCALER_FILES,
            )
        if self.scaler_port < 0:
            return self
        if self.pools_file is None:
            raise SettingsConflict(
                "STREAM_GW_SCALER_PORT needs STREAM_GW_POOLS_FILE: the scaler serves the planned pools",
                "scaler_port",
                "pools_file",
            )
        if files[0] is None and not _is_loopback(self.scaler_host):
            raise SettingsConflict(
                f"STREAM_GW_SCALER_HOST {self.scaler_host} is not loopback: set STREAM_GW_SCALER_CERT, "
                "STREAM_GW_SCALER_KEY and STREAM_GW_SCALER_CLIENT_CA",
                "scaler_port",
                "scaler_host",
                *_SCALER_FILES,
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
