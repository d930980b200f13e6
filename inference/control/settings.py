"""The controller's settings."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from stream_fabric.settings import EmitSettings


class ControllerSettings(EmitSettings):
    pools_file: Path | None = Field(None, description="TOML file that declares pools: what replicas each is to have")
    telemetry_url: str = Field(
        "",
        pattern=r"^(https?://[^\s/?#@]+/?)?$",
        description="With pools_file: where stream-gw telemetry tells what usually arrives; empty: nobody is asked",
    )
    telemetry_token: SecretStr = Field(SecretStr(""), description="With telemetry_url: its bearer token")
    pod_deletion_cost: bool = Field(
        False, description="With pools_file, in Kubernetes: tell it which pod may go; needs to list and patch pods"
    )
    pod_account: Path = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        description="With pod_deletion_cost: folder of the pod's service account, with token, ca.crt and namespace",
    )
    drain_stuck: bool = Field(True, description="Drain a ready replica whose requests wait far longer than its peers'")
    stuck_ratio: float = Field(
        3.0,
        ge=1.5,
        le=100,
        description="Far longer: a 99th percentile of queue time so many times the pool's median, and over a second",
    )
    metrics_port: int = Field(
        -1, ge=-1, le=65535, description="Port of /metrics and /healthz; 0: any free one, -1: none"
    )
    metrics_host: str = Field("127.0.0.1", description="Address to listen on for them")
    scaler_port: int = Field(
        -1,
        ge=-1,
        le=65535,
        description="With pools_file: port to tell KEDA of them by gRPC, its trigger external-push; 0: any free one, "
        "-1: none",
    )
    scaler_host: str = Field(
        "127.0.0.1", description="Address to listen on for it; another than loopback needs the three files below"
    )
    scaler_cert: Path | None = Field(None, description="With scaler_port: the certificate to show, PEM")
    scaler_key: Path | None = Field(None, description="With scaler_cert: its key, PEM, without a passphrase")
    scaler_client_ca: Path | None = Field(
        None, description="With scaler_cert: the CAs of those who may ask, PEM; nobody else is answered"
    )

    @model_validator(mode="after")
    def _the_scaler_is_whole(self) -> Self:
        files = (self.scaler_cert, self.scaler_key, self.scaler_client_ca)
        if len({path is None for path in files}) > 1:
            raise ValueError("STREAM_GW_SCALER_CERT, STREAM_GW_SCALER_KEY and STREAM_GW_SCALER_CLIENT_CA go together")
        if self.scaler_port < 0:
            return self
        if self.pools_file is None:
            raise ValueError("STREAM_GW_SCALER_PORT needs STREAM_GW_POOLS_FILE: it tells of the pools planned")
        if files[0] is None and not _is_loopback(self.scaler_host):
            raise ValueError(
                f"STREAM_GW_SCALER_HOST {self.scaler_host} is not loopback: set STREAM_GW_SCALER_CERT, "
                "STREAM_GW_SCALER_KEY and STREAM_GW_SCALER_CLIENT_CA"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
