"""Moderation of prompts: after a request is admitted to its limits, and before it is placed."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from stream_fabric.accounts.records import PlanRecord
from stream_fabric.errors import ContentFiltered
from stream_fabric.moderation.moderator import Moderator, unconfigured

_FIELDS = (
    "messages", "prompt", "suffix", "input", "query", "documents", "tools",
    "queries", "items", "data_1", "data_2", "text_1", "text_2", "instruction",
)  # fmt: skip
_OFF_LOOP_BYTES = 64 << 10


async def moderate_prompt(moderator: Moderator | None, plan: PlanRecord, body: msgspec.Raw) -> None:
    """Check the text of a request, if the plan asks for it. Raises ContentFiltered or ModerationUnavailable."""
    if plan.moderation != "off":
        await _moderate(moderator, body, _FIELDS)


async def moderate_input(moderator: Moderator | None, plan: PlanRecord, item: msgspec.Raw) -> None:
    """Check an input to a running stream, as a prompt."""
    if plan.moderation != "off":
        await _moderate(moderator, msgspec.Raw(b'{"input":' + bytes(item) + b"}"), ("input",))


async def _moderate(moderator: Moderator | None, body: msgspec.Raw, fields: tuple[str, ...]) -> None:
    if moderator is None:
        raise unconfigured()
    if len(bytes(body)) > _OFF_LOOP_BYTES:
        texts = await asyncio.to_thread(texts_of, body, fields)
        local = await asyncio.to_thread(moderator.check_local, texts) if moderator.is_local else None
        category = local if moderator.is_local else await moderator.check(texts)
    else:
        category = await moderator.check(texts_of(body, fields))
    if category is not None:
        raise ContentFiltered(f"the prompt was filtered by moderation: {category[:200]}", param="prompt")


def texts_of(body: msgspec.Raw, fields: tuple[str, ...]) -> list[str]:
    """Return every string of these fields, joined to one text for each field; images and other data are left out."""
    parsed = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    texts = []
    for name in fields:
        if name in parsed:
            found: list[str] = []
            _collect(msgspec.json.decode(parsed[name]), found)
            texts.append("\n".join(found))
    return texts


def _collect(value: Any, found: list[str]) -> None:
    match value:
        case str() if not value.startswith("data:"):
            found.append(value)
        case list():
            for item in value:
                _collect(item, found)
        case dict():
            for item in value.values():
                _collect(item, found)
