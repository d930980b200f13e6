"""Settings that every role shares. A role's own settings inherit them; variables carry the prefix ``STREAM_GW_``."""

from __future__ import annotations

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

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

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, value: str) -> str:
        RedisUrl.parse(value)
        return value
