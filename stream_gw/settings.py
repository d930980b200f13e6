"""The gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from stream_fabric.accounts.records import REGION_PATTERN
from stream_fabric.limits import (
    QUEUE_MAX,
    QUEUE_WAIT_S_MAX,
    RESPONSE_BYTES_MAX,
    RESPONSE_DAYS,
    RESPONSE_DAYS_MAX,
    RESPONSES_HELD_BYTES_MAX,
    RESPONSES_STORED_BYTES_MAX,
    TRACE_ONE_IN_MAX,
)
from stream_fabric.moderation.settings import ModerationSettings
from stream_fabric.process.settings import EmitSettings, FabricSettings, SettingsConflict
from stream_gw.auth.peppered import PEPPER_BYTES_MIN
from stream_gw.auth.tokens import SECRET_BYTES_MIN

_DATABASES = ("postgresql://", "postgres://", "sqlite:///")


class DatabaseSettings(FabricSettings):
    """The database of tenants, for gateways and for the commands that change it."""

    database_url: str = Field(
        "",
        description="URL of the database of tenants, keys, plans and stored responses: "
        "postgresql://user:password@host/name, or sqlite:////path for one machine; empty: none",
        repr=False,
    )
    key_pepper: SecretStr = Field(
        SecretStr(""),
        description="Secret with which API keys of the database are hashed, the same in the whole fleet, at least 16 "
        "bytes; empty: only keys of a keys file",
    )

    key_pepper_previous: SecretStr = Field(
        SecretStr(""),
        description="Pepper before key_pepper, whose keys are accepted until they are rotated, at least 16 bytes; "
        "empty: none",
    )

    @field_validator("database_url")
    @classmethod
    def _check_database_url(cls, value: str) -> str:
        if value and (not value.startswith(_DATABASES) or value == "sqlite:///"):
            raise ValueError(f"must begin with {', '.join(_DATABASES)} and name a database")
        return value

    @field_validator("key_pepper", "key_pepper_previous")
    @classmethod
    def _check_key_pepper(cls, value: SecretStr) -> SecretStr:
        if 0 < len(value.get_secret_value().encode()) < PEPPER_BYTES_MIN:
            raise ValueError(f"must have at least {PEPPER_BYTES_MIN} bytes")
        return value

    @model_validator(mode="after")
    def _check_peppers(self) -> DatabaseSettings:
        previous = self.key_pepper_previous.get_secret_value()
        if previous and not self.key_pepper.get_secret_value():
            raise SettingsConflict(
                "STREAM_GW_KEY_PEPPER_PREVIOUS needs STREAM_GW_KEY_PEPPER, the pepper of new keys",
                "key_pepper_previous",
                "key_pepper",
            )
        return self


class GatewaySettings(DatabaseSettings, EmitSettings, ModerationSettings):
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0: any free port")
    gateway: str = Field(
        "", max_length=64, description="Name of the gateway, to which its process id is added; empty: the host's name"
    )
    region: str = Field(
        "",
        pattern=rf"^({REGION_PATTERN})?$",
        description="Region of the gateway, shown in traces; tenants bound to other regions are refused",
    )
    trace_one_in: int = Field(
        1,
        ge=1,
        le=TRACE_ONE_IN_MAX,
        description="Trace 1 in N successful requests; failed requests and billing records are always kept",
    )
    access_log_one_in: int = Field(
        100,
        ge=0,
        le=1_000_000,
        description="Log 1 in N successful requests, 0: none; failed requests are logged too, at most 20 a second "
        "of each tenant and error",
    )
    telemetry_url: str = Field(
        "",
        pattern=r"^(https?://[^\s/?#@]+/?)?$",
        description="URL of stream-gw telemetry, for /v1/admin/traces and /v1/admin/ops; empty: no telemetry",
    )
    telemetry_token: SecretStr = Field(SecretStr(""), description="Bearer token for telemetry_url")
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://[^\s]+)?$",
        description="OTLP endpoint for traces over HTTP, for example http://host:4318; empty: no export",
    )
    otlp_names: Literal["1.41", "next"] = Field(
        "1.41", description="Version of OpenTelemetry's semantic conventions for generative AI: 1.41 or next"
    )
    keys_file: Path | None = Field(None, description="TOML file of tenants with the hashes of their API keys")
    dev_key: SecretStr = Field(
        SecretStr(""), description="API key of tenant 'dev', for development; not together with keys_file"
    )
    token_secret: SecretStr = Field(
        SecretStr(""),
        description="Secret that signs capability tokens, the same on every gateway, at least 16 bytes; empty: "
        "/v1/tokens is off",
    )
    token_secrets_accepted: SecretStr = Field(
        SecretStr(""),
        description="Further secrets, separated by commas, whose tokens are accepted but which sign none, for changing "
        "token_secret; empty: none",
    )
    cors_origins: str = Field(
        "",
        pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^\s/?#@,*A-Z]+(,[a-z][a-z0-9+.-]*://[^\s/?#@,*A-Z]+)*)?$",
        description="Origins whose pages may call the API with a bearer token, separated by commas, for example "
        "https://chat.example; *: every origin; empty: only the gateway's own",
    )
    image_models: str = Field(
        "",
        description="Models that take images, separated by commas; /v1/models then lists their input_modalities, and "
        "the chat page lets its users attach images; *: every model; empty: none",
    )
    media_domains: str = Field(
        "",
        pattern=r"^(\*|[A-Za-z0-9.-]+( *, *[A-Za-z0-9.-]+)*)?$",
        description="Hosts whose URLs of images, audio, video and files engines may fetch, separated by commas, for "
        "example images.example; *: every host that the engine reaches, internal ones too; empty: none, only data URLs",
    )
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        le=600,
        description="Seconds after SIGTERM in which /readyz is 503 and new requests are still answered, so that load "
        "balancers notice; 0: new requests are refused at once",
    )
    drain_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="Seconds that open streams may continue after SIGTERM; 0: closed at once",
    )
    drain_spread_s: float = Field(
        5.0, ge=0, le=600, description="Seconds over which readers are told to reconnect elsewhere; 0: all at once"
    )
    ready_without_redis_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="Seconds that /readyz stays 200 while Redis is away, so that a failover removes no gateway "
        "from its load balancer; 0: it fails at once",
    )
    queue_max: int = Field(
        QUEUE_MAX,
        ge=0,
        le=1_000_000,
        description="Maximum queued requests per pool, further ones get 503 pool_full; 0: no queue",
    )
    queue_wait_s: float = Field(
        QUEUE_WAIT_S_MAX,
        ge=0,
        le=3600,
        description="Maximum seconds in the queue before a request fails, longer while its pool starts; 0: at once",
    )
    response_days: int = Field(
        RESPONSE_DAYS,
        ge=0,
        le=RESPONSE_DAYS_MAX,
        description="Days that the database keeps stored responses and conversations, where the plan does not say; "
        "0: none are written there",
    )
    response_bytes_max: int = Field(
        RESPONSE_BYTES_MAX,
        ge=1024,
        le=256 << 20,
        description="Maximum bytes of a stored response's request, and of its output; a larger request gets 400 "
        "response_too_large",
    )
    response_held_bytes_max: int = Field(
        RESPONSES_HELD_BYTES_MAX,
        ge=1024,
        description="Maximum bytes of a tenant's stored responses in Redis, compressed; further requests get 429 "
        "response_storage_full",
    )
    response_stored_bytes_max: int = Field(
        RESPONSES_STORED_BYTES_MAX,
        ge=0,
        description="Maximum bytes of a tenant's stored responses and conversations in the database, compressed; "
        "further requests get 429 response_storage_full; 0: no limit",
    )
    limits_fail_open: bool = Field(
        False,
        description="Admit requests without their limits while Redis does not answer for their account, except "
        "where the plan has budgets; false: they get 503 fabric_unavailable",
    )
    plain_grace_s: float = Field(
        2.0,
        ge=0,
        le=3600,
        description="Seconds until a plain stream is cancelled after its last reader left; 0: at once",
    )
    kept_grace_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="Seconds until a stream with an Idempotency-Key or a session, or one created over WebSocket, is "
        "cancelled after its last reader left; 0: at once",
    )

    @field_validator("token_secret", "token_secrets_accepted")
    @classmethod
    def _check_token_secrets(cls, value: SecretStr, info: ValidationInfo) -> SecretStr:
        text = value.get_secret_value()
        secrets = [text] if info.field_name == "token_secret" else map(str.strip, text.split(","))
        if any(0 < len(secret.encode()) < SECRET_BYTES_MIN for secret in secrets):
            raise ValueError(f"each secret must have at least {SECRET_BYTES_MIN} bytes")
        return value

    @model_validator(mode="after")
    def _check_keys(self) -> GatewaySettings:
        if self.keys_file is not None and self.dev_key.get_secret_value():
            raise SettingsConflict(
                "set --keys-file (STREAM_GW_KEYS_FILE) or --dev-key (STREAM_GW_DEV_KEY), not both",
                "keys_file",
                "dev_key",
            )
        return self
