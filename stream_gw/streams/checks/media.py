"""Checks the URLs of images, audio, video and files: an engine fetches them, from inside the operator's network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from stream_fabric.errors import Unsupported
from stream_fabric.native import may_hold_url

_FIELDS = (
    "messages", "prompt", "input", "query", "documents", "queries", "items", "data_1", "data_2", "text_1", "text_2",
)  # fmt: skip
"""Fields of an engine's body that hold parts of a prompt."""
_URL = re.compile(r"https?://([a-z0-9.-]+)(:\d+)?(/[^\s\\]*)?", re.IGNORECASE | re.ASCII)
"""URLs whose host is the same for every parser."""
_URL_CHARS_TOLD = 100
EVERY = "*"


def check_media(body: msgspec.Raw, domains: str) -> bool:
    """Check that an engine fetches nothing for a body but URLs of allowed hosts. False: the body holds no media.

    Raises Unsupported.

    ``domains``: the setting ``media_domains``.
    """
    if not may_hold_url(bytes(body)):
        return False
    allowed = {name.strip().lower() for name in domains.split(",")}
    if EVERY in allowed:
        return True
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name in _FIELDS:
        if name in fields and may_hold_url(bytes(fields[name])):
            for part, url in _urls(msgspec.json.decode(fields[name])):
                found = _URL.fullmatch(url)
                if not url.startswith("data:") and (found is None or found[1].lower() not in allowed):
                    raise Unsupported(
                        f"{part} must be a data URL: {_told(found, url)} is not fetched here. Send the content, or ask "
                        "the operator to allow the host (STREAM_GW_MEDIA_DOMAINS)",
                        param=name,
                    )
    return True


def _told(found: re.Match[str] | None, url: str) -> str:
    return f"the host {found[1]!r}" if found is not None else f"{url[:_URL_CHARS_TOLD]!r}"


def _urls(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and URL of each part of a prompt that has one."""
    if isinstance(value, list):
        for item in value:
            yield from _urls(item)
    elif isinstance(value, dict):
        for name, member in value.items():
            if name.endswith("_url"):
                url = member.get("url") if isinstance(member, dict) else member
                if isinstance(url, str):
                    yield name, url
            elif name != "tool_calls":
                yield from _urls(member)
