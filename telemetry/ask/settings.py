"""Settings of ``stream-gw traces`` and ``stream-gw usage``."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator

from stream_fabric.process.settings import FabricSettings
from telemetry.store.connection import Address


class AskSettings(FabricSettings):
    telemetry_url: str = Field("", description="URL of stream-gw telemetry, for example http://127.0.0.1:9464")
    telemetry_token: SecretStr = Field(SecretStr(""), description="Bearer token of stream-gw telemetry")
    clickhouse: str = Field(
        "", description="URL of ClickHouse, to query it directly instead of telemetry_url", repr=False
    )

    @field_validator("telemetry_url")
    @classmethod
    def _is_telemetry_url(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("a URL of stream-gw telemetry is http://host:port, for example http://127.0.0.1:9464")
        return value

    @field_validator("clickhouse")
    @classmethod
    def _is_clickhouse_url(cls, value: str) -> str:
        if value:
            Address.parse(value)
        return value
