"""Settings of moderation, for gateways (prompts) and agents (answers)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from stream_fabric.process.settings import FabricSettings


class ModerationSettings(FabricSettings):
    moderation_url: str = Field(
        "",
        description="URL of an OpenAI-compatible moderation endpoint, for example "
        "https://api.openai.com/v1/moderations; it checks content of plans with moderation. Empty: none",
    )
    moderation_key: SecretStr = Field(
        SecretStr(""), description="API key of moderation_url, sent as bearer token; empty: none"
    )
    moderation_model: str = Field("", description="Model that moderation_url is asked for; empty: the endpoint's own")
    moderation_timeout_s: float = Field(
        2.0, gt=0, le=60, description="Time limit of one question to moderation_url, in seconds"
    )
    moderation_rules_file: Path | None = Field(
        None,
        description="TOML file of local rules: categories with patterns of RE2; needs stream-gw[privacy]. Empty: none",
    )
    moderation_fail: Literal["closed", "open"] = Field(
        "closed",
        description="Content that cannot be checked because moderation_url does not answer: closed refuses it, open "
        "lets it pass",
    )

    @field_validator("moderation_url")
    @classmethod
    def _is_http_url(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("must be an http:// or https:// URL")
        return value
