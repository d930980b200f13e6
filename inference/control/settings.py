"""The controller's settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

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
