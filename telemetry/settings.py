"""The settings of the consumer, ``stream-gw telemetry``."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator

from stream_fabric.process.settings import EventSettings
from telemetry.store.connection import Address


class DeadLetterSettings(EventSettings):
    """Where the dead letters are, for the verbs that read them."""

    telemetry_dlq_topic: str = Field(
        "stream-gw.events.dlq",
        pattern=r"^[a-zA-Z0-9._-]{1,200}$",
        description="Topic of dead letters, for events by Kafka",
    )


class TelemetrySettings(DeadLetterSettings):
    clickhouse: str = Field(
        "",
        description="Where events go: http(s)://user:password@host:port/database, or chdb:///folder for the engine "
        "inside this process, which alone may open the folder",
        repr=False,
    )
    clickhouse_reader: str = Field(
        "",
        description="The same ClickHouse with the user that queries run as; give it the role of "
        "telemetry/store/schema/reader.sql. Empty: the user of clickhouse",
        repr=False,
    )
    telemetry_group: str = Field(
        "stream-gw-telemetry",
        pattern=r"^[a-zA-Z0-9._-]{1,200}$",
        description="Consumer group for events by Kafka. Its offsets record what was inserted; do not change it",
    )
    telemetry_block_rows: int = Field(20_000, ge=1, le=60_000, description="Maximum records in one insert")
    telemetry_block_mb: int = Field(
        8, ge=1, le=256, description="Maximum MiB in one insert; a partition holds up to two such blocks in memory"
    )
    telemetry_linger_s: float = Field(
        1.0, ge=0, le=60, description="Maximum wait of a record for a full block, in seconds"
    )
    telemetry_session_s: float = Field(
        10.0, ge=1, le=300, description="Time in seconds after which a silent consumer loses its partitions"
    )
    telemetry_drain_s: float = Field(10.0, ge=0, le=600, description="Time in seconds to finish blocks on SIGTERM")
    telemetry_raw_days: int = Field(30, ge=1, le=3650, description="Days that requests, attempts and fleet are kept")
    telemetry_content_days: int = Field(
        7,
        ge=1,
        le=3650,
        description="Maximum days that prompts and completions in traces are kept",
    )
    telemetry_rollup_days: int = Field(
        400, ge=1, le=36_500, description="Days that the roll-ups by minute and hour are kept"
    )
    telemetry_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of /query, /sql, /traces, /healthz and /metrics; 0: any free port",
    )
    telemetry_host: str = Field("127.0.0.1", description="Address that telemetry_port listens on")
    telemetry_token: SecretStr = Field(
        SecretStr(""), description="Bearer token for /query, /sql and /traces; empty: these are disabled"
    )

    @field_validator("clickhouse", "clickhouse_reader")
    @classmethod
    def _is_clickhouse_url(cls, value: str) -> str:
        if value:
            Address.parse(value)
        return value
