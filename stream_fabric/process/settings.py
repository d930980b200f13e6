"""Settings that every role shares. A role's own settings inherit them; variables carry the prefix ``STREAM_GW_``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from stream_fabric.limits import EVENTS_MEMORY_BYTES_MAX, EVENTS_REDIS_BYTES_MAX, EVENTS_SPOOL_BYTES_MAX
from stream_fabric.redis.client import RedisUrl


class FabricSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="STREAM_GW_", extra="forbid", frozen=True, hide_input_in_errors=True)

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Where Redis is: redis://, rediss://, redis+sentinel://a,b/master or redis+cluster://a,b",
        repr=False,
    )
    partitions: int = Field(
        16, ge=1, le=4096, description="Slots the streams are spread over; the same in the whole fleet, for good"
    )

    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="What is logged on stderr: json, text, or auto: text on a terminal, else json"
    )

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, value: str) -> str:
        RedisUrl.parse(value)
        return value


class EventSettings(FabricSettings):
    """How events travel: of the processes that emit them, and of those that consume them."""

    events: Literal["redis", "kafka", "off"] = Field(
        "redis", description="What carries telemetry events: the platform's Redis, Kafka, or nothing"
    )
    events_topic: str = Field(
        "stream-gw.events",
        pattern=r"^[a-zA-Z0-9._-]{1,200}$",
        description="events kafka: the topic",
    )
    events_redis_bytes_max: int = Field(
        EVENTS_REDIS_BYTES_MAX,
        ge=1 << 20,
        le=1 << 40,
        description="events redis: what Redis holds until it is consumed; a quarter is for billing facts alone",
    )
    kafka_servers: str = Field("", description="events kafka: brokers to begin with, as a:9092,b:9092")
    kafka_tls: bool = Field(False, description="Speak TLS to Kafka; certificates and names are verified")
    kafka_ca: str = Field("", description="With kafka_tls: a PEM to trust in place of the system's CAs")
    kafka_cert: str = Field("", description="With kafka_tls: a certificate to show, PEM")
    kafka_key: str = Field("", description="With kafka_cert: its key, PEM, without a passphrase")
    kafka_sasl: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "", description="How to log in to Kafka; empty: not at all"
    )
    kafka_user: str = Field("", description="With kafka_sasl: the user")
    kafka_password: SecretStr = Field(SecretStr(""), description="With kafka_sasl: the password")
    telemetry_create_topics: bool = Field(
        False, description="events kafka: create a topic that is missing, with the brokers' own defaults"
    )

    @model_validator(mode="after")
    def _kafka_is_whole(self) -> Self:
        if self.events != "kafka":
            return self
        if not self.kafka_servers:
            raise ValueError("events kafka needs brokers: set STREAM_GW_KAFKA_SERVERS to host:port,host:port")
        if bool(self.kafka_sasl) != bool(self.kafka_user):
            raise ValueError("STREAM_GW_KAFKA_SASL and STREAM_GW_KAFKA_USER go together")
        if not self.kafka_tls and (self.kafka_ca or self.kafka_cert):
            raise ValueError("STREAM_GW_KAFKA_CA and STREAM_GW_KAFKA_CERT need STREAM_GW_KAFKA_TLS=true")
        if bool(self.kafka_cert) != bool(self.kafka_key):
            raise ValueError("STREAM_GW_KAFKA_CERT and STREAM_GW_KAFKA_KEY go together")
        return self


class EmitSettings(EventSettings):
    """Of the processes that emit events."""

    events_spool: str = Field(
        "",
        description="Folder on disk for events that cannot be delivered now, shared by a host's processes; empty: none",
    )
    events_spool_bytes_max: int = Field(
        EVENTS_SPOOL_BYTES_MAX, ge=1 << 20, le=1 << 40, description="What one process may hold there"
    )
    events_memory_bytes_max: int = Field(
        EVENTS_MEMORY_BYTES_MAX,
        ge=4 << 20,
        le=1 << 32,
        description="Events in memory, not yet delivered; over: dropped; a quarter is for billing facts alone",
    )
