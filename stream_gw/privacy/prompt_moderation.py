"""Moderation of prompts: after a request is admitted to its limits, and before it is placed."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from stream_fabric.accounts.records import PlanRecord
from stream_fabric.errors import ContentFiltered, Unsupported
from stream_fabric.moderation.moderator import Moderator, unconfigured

_FIELDS = (
    "messages", "prompt", "suffix", "input", "query", "documents", "tools",
    "queries", "items", "data_1", "data_2", "text_1", "text_2", "instruction", "chat_template", "chat_template_kwargs",
)  # fmt: skip
_NAMED = ("tools", "chat_template_kwargs")
"""Fields whose names of members are in the prompt, too."""
_MEDIA = ("url", "image_url", "file_data")
_MEDIA_URL = re.compile(r"data:[\w.+/;=-]*;base64,[\w+/=-]*", re.ASCII)
"""An image or another file. A text may begin with ``data:`` as well, and counts."""
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
    """Return every string of these fields, joined to one text for each field; images and other files are left out.

    Raises Unsupported for a prompt that has no text to check.
    """
    parsed = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if bytes(parsed.get("prompt_embeds", b"null")) != b"null" or _has_token_ids(parsed.get("prompt")):
        raise Unsupported(
            "the plan asks for moderation, which reads text alone; send the prompt as text", param="prompt"
        )
    texts = []
    for name in fields:
        if name in parsed:
            found: list[str] = []
            _collect(msgspec.json.decode(parsed[name]), found, with_names=name in _NAMED)
            texts.append("\n".join(found))
    return texts


def _has_token_ids(prompt: msgspec.Raw | None) -> bool:
    """Whether a prompt is a list of token ids, or of lists of them."""
    if prompt is None or bytes(prompt)[:1] != b"[":
        return False
    parts = msgspec.json.decode(prompt, type=list[Any])
    return bool(parts) and not isinstance(parts[0], str)


def _collect(value: Any, found: list[str], *, with_names: bool, name: str = "") -> None:
    match value:
        case str() if not (name in _MEDIA and _MEDIA_URL.fullmatch(value)):
            found.append(value)
        case list():
            for item in value:
                _collect(item, found, with_names=with_names, name=name)
        case dict():
            if with_names:
                found += value
            for name, item in value.items():
                _collect(item, found, with_names=with_names, name=name)
