"""The settings of the consumer, ``stream-gw telemetry``."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator

from stream_fabric.settings import EventSettings
from telemetry.store import Store


class TelemetrySettings(EventSettings):
    clickhouse: str = Field(
        "",
        description="Where events go: http(s)://user:password@host:port/database, or chdb:///folder for the engine "
        "inside this process, which alone may open the folder",
        repr=False,
    )
    telemetry_group: str = Field(
        "stream-gw-telemetry",
        pattern=r"^[a-zA-Z0-9._-]{1,200}$",
        description="events kafka: the consumer group; its offsets say what was inserted, so keep it",
    )
    telemetry_dlq_topic: str = Field(
        "stream-gw.events.dlq",
        pattern=r"^[a-zA-Z0-9._-]{1,200}$",
        description="events kafka: the topic of records that are no events",
    )
    telemetry_block_rows: int = Field(20_000, ge=1, le=60_000, description="Records inserted at once, at most")
    telemetry_block_mb: int = Field(8, ge=1, le=256, description="The same in MiB; two such are held a partition")
    telemetry_linger_s: float = Field(1.0, ge=0, le=60, description="A record waits at most so long for others")
    telemetry_session_s: float = Field(
        10.0, ge=1, le=300, description="A consumer not heard of for so long has lost its partitions"
    )
    telemetry_drain_s: float = Field(10.0, ge=0, le=600, description="On SIGTERM, how long blocks may be finished")
    telemetry_raw_days: int = Field(30, ge=1, le=3650, description="Days that requests, attempts and fleet are kept")
    telemetry_content_days: int = Field(
        7,
        ge=1,
        le=3650,
        description="Days at most that prompts and completions are kept, of tenants whose traces hold them",
    )
    telemetry_rollup_days: int = Field(
        400, ge=1, le=36_500, description="Days that the sums by minute are kept, and those that scaling learns from"
    )
    telemetry_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of /query, /sql, /traces, /healthz and /metrics; 0: any free one",
    )
    telemetry_host: str = Field("127.0.0.1", description="Address to listen on for them")
    telemetry_token: SecretStr = Field(SecretStr(""), description="Bearer token of who may ask; empty: nobody may")

    @field_validator("clickhouse")
    @classmethod
    def _is_clickhouse_url(cls, value: str) -> str:
        if value:
            Store(value)
        return value
