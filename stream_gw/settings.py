"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from stream_fabric.limits import QUEUE_MAX, QUEUE_WAIT_S_MAX
from stream_fabric.settings import EmitSettings


class GatewaySettings(EmitSettings):
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0: any free one")
    gateway: str = Field("", max_length=64, description="A name for the gateway; empty: the host's and process's")
    region: str = Field("", max_length=64, description="Where the gateway is, as traces tell it")
    trace_one_in: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="Of requests that succeed, one in so many leaves a trace; all others always do, and bills",
    )
    access_log_one_in: int = Field(
        100,
        ge=0,
        le=1_000_000,
        description="Of requests that go well, one in so many is logged; 0: none; those that fail always are",
    )
    telemetry_url: str = Field(
        "",
        pattern=r"^(https?://[^\s/?#@]+/?)?$",
        description="Where stream-gw telemetry answers, for /v1/admin/traces; empty: there is none",
    )
    telemetry_token: SecretStr = Field(SecretStr(""), description="With telemetry_url: its bearer token")
    otlp_endpoint: str = Field(
        "", description="Where traces go as OpenTelemetry's spans: OTLP over HTTP, as http://host:4318; empty: nowhere"
    )
    otlp_names: Literal["1.41", "next"] = Field(
        "1.41", description="The version of OpenTelemetry's names for generative AI: 1.41 or next"
    )
    keys_file: Path | None = Field(None, description="TOML file of tenants and the hashes of their keys")
    dev_key: SecretStr = Field(
        SecretStr(""), description="One key for tenant 'dev', for a laptop; not beside keys_file"
    )
    token_secret: SecretStr = Field(
        SecretStr(""), description="Signs capability tokens; the same on every gateway; empty: /v1/tokens is off"
    )
    drain_s: float = Field(30.0, ge=0, le=3600, description="On SIGTERM, how long open streams may go on")
    drain_spread_s: float = Field(5.0, ge=0, le=600, description="Reconnect hints are spread over so long")
    ready_without_redis_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="/readyz stays 200 while Redis is away for no longer: a failover takes no gateway off its balancer",
    )
    queue_max: int = Field(
        QUEUE_MAX, ge=0, le=1_000_000, description="Requests that may wait for a replica in a pool; over: 503 pool_full"
    )
    queue_wait_s: float = Field(
        QUEUE_WAIT_S_MAX, ge=0, le=3600, description="How long a request may wait for a replica; then it fails"
    )
    plain_grace_s: float = Field(
        2.0, ge=0, le=3600, description="A plain stream is cancelled so long after its last reader left"
    )
    kept_grace_s: float = Field(
        30.0, ge=0, le=3600, description="The same for one with an Idempotency-Key, a session, or made over WebSocket"
    )
