"""What ``stream-gw traces`` and ``stream-gw usage`` need to know."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator

from stream_fabric.settings import FabricSettings
from telemetry.store import Store


class AskSettings(FabricSettings):
    telemetry_url: str = Field("", description="Where stream-gw telemetry answers, for example http://127.0.0.1:9464")
    telemetry_token: SecretStr = Field(SecretStr(""), description="Its bearer token")
    clickhouse: str = Field(
        "", description="In place of telemetry_url: the ClickHouse itself, as stream-gw telemetry has it", repr=False
    )

    @field_validator("clickhouse")
    @classmethod
    def _is_clickhouse_url(cls, value: str) -> str:
        if value:
            Store(value)
        return value
