"""Settings shared by the roles. A role's own settings inherit from these; variables have the prefix ``STREAM_GW_``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from stream_fabric.limits import EVENTS_MEMORY_BYTES_MAX, EVENTS_REDIS_BYTES_MAX, EVENTS_SPOOL_BYTES_MAX
from stream_fabric.process.logs import Level
from stream_fabric.redis_url import RedisUrl


class SettingsConflict(ValueError):
    """Settings that are wrong together. ``names``: the fields that the check compares."""

    def __init__(self, message: str, *names: str) -> None:
        super().__init__(message)
        self.names = names


class FabricSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="STREAM_GW_", extra="forbid", frozen=True, hide_input_in_errors=True)

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="URL of Redis: redis://, rediss://, redis+sentinel://a,b/master or redis+cluster://a,b",
        repr=False,
    )
    partitions: int = Field(
        16,
        ge=1,
        le=4096,
        description="Partitions of the streams, best a power of two; the same in the whole fleet, never changed later",
    )

    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="Format of the logs on stderr: json, text, or auto (text on a terminal, json otherwise)"
    )
    log_level: Level = Field(
        "info", description="Lowest level that is logged: debug, info, warning or error; libraries log only warnings"
    )

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, value: str) -> str:
        RedisUrl.parse(value)
        return value


class EventSettings(FabricSettings):
    """Transport of telemetry events, for the processes that emit and that consume them."""

    events: Literal["redis", "kafka", "off"] = Field(
        "redis", description="Transport of telemetry events: the platform's Redis, Kafka, or off"
    )
    events_topic: str = Field(
        "stream-gw.events",
        pattern=r"^[a-zA-Z0-9._-]{1,200}$",
        description="Kafka topic of the events",
    )
    events_redis_bytes_max: int = Field(
        EVENTS_REDIS_BYTES_MAX,
        ge=1 << 20,
        le=1 << 40,
        description="Bytes of events that Redis holds until they are consumed; a quarter is for billing events only",
    )
    kafka_servers: str = Field("", description="Kafka bootstrap servers, for example a:9092,b:9092")
    kafka_tls: bool = Field(False, description="Use TLS to Kafka; certificates and host names are verified")
    kafka_ca: str = Field("", description="PEM file of CAs to trust for Kafka instead of the system's; needs kafka_tls")
    kafka_cert: str = Field("", description="PEM file of the client certificate for Kafka; needs kafka_tls")
    kafka_key: str = Field("", description="PEM file of that certificate's key, without a passphrase; needs kafka_cert")
    kafka_sasl: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "", description="SASL mechanism for Kafka; empty: no login"
    )
    kafka_user: str = Field("", description="SASL user for Kafka")
    kafka_password: SecretStr = Field(SecretStr(""), description="SASL password for Kafka")
    telemetry_create_topics: bool = Field(
        False, description="Create missing Kafka topics, with the brokers' default settings"
    )

    @model_validator(mode="after")
    def _check_kafka(self) -> Self:
        if self.events != "kafka":
            return self
        if not self.kafka_servers:
            raise SettingsConflict(
                "STREAM_GW_EVENTS=kafka needs brokers; set STREAM_GW_KAFKA_SERVERS to host:port,host:port",
                "events",
                "kafka_servers",
            )
        if bool(self.kafka_sasl) != bool(self.kafka_user):
            raise SettingsConflict(
                "STREAM_GW_KAFKA_SASL and STREAM_GW_KAFKA_USER must be set together", "kafka_sasl", "kafka_user"
            )
        if not self.kafka_tls and (self.kafka_ca or self.kafka_cert):
            raise SettingsConflict(
                "STREAM_GW_KAFKA_CA and STREAM_GW_KAFKA_CERT need STREAM_GW_KAFKA_TLS=true",
                "kafka_ca",
                "kafka_cert",
                "kafka_tls",
            )
        if bool(self.kafka_cert) != bool(self.kafka_key):
            raise SettingsConflict(
                "STREAM_GW_KAFKA_CERT and STREAM_GW_KAFKA_KEY must be set together", "kafka_cert", "kafka_key"
            )
        return self


class EmitSettings(EventSettings):
    """Buffers of the processes that emit events."""

    events_spool: str = Field(
        "",
        description="Folder of the disk spool for events that cannot be delivered now, shared by a host's processes; "
        "empty: no spool",
    )
    events_spool_bytes_max: int = Field(
        EVENTS_SPOOL_BYTES_MAX,
        ge=1 << 20,
        le=1 << 40,
        description="Bytes that one process may hold in the spool; more events are dropped",
    )
    events_memory_bytes_max: int = Field(
        EVENTS_MEMORY_BYTES_MAX,
        ge=4 << 20,
        le=1 << 32,
        description="Bytes of undelivered events in memory; more are dropped; a quarter is for billing events only",
    )


class MetricsSettings(FabricSettings):
    """Where the processes that serve no API of their own serve their metrics."""

    metrics_port: int = Field(
        -1, ge=-1, le=65535, description="Port of /metrics and /healthz; 0: any free port, -1: not served"
    )
    metrics_host: str = Field("127.0.0.1", description="Address that metrics_port listens on")
