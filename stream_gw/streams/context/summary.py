"""Has a model summarise items of a conversation."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from stream_fabric.errors import EngineFailed
from stream_fabric.limits import COMPACTION_TOKENS_MAX
from stream_gw.dialects.requests import CreateRequest, parse_create
from stream_gw.responses import Item, summary_request
from stream_gw.streams.context.asides import Asides
from stream_gw.streams.off_loop import off_loop
from stream_gw.streams.opened import OpenedStream


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class SummaryUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails
    completion_tokens_details: _CompletionDetails


class _Completion(msgspec.Struct):
    """The part of a chat completion that a compaction reads."""

    choices: list[_Choice]
    usage: SummaryUsage


class Summary(NamedTuple):
    stream: OpenedStream
    text: str
    usage: SummaryUsage


async def summarised(
    asides: Asides,
    model: str,
    instructions: str | None,
    items: list[Item],
    size: int,
    tokens_max: int = COMPACTION_TOKENS_MAX,
    like: CreateRequest | None = None,
) -> Summary:
    """Return the model's summary of items. ``size``: their bytes, about. ``like``: the request whose caller and place
    in the queue it gets.

    Raises StreamGwError.
    """
    request = await off_loop(
        size, lambda: parse_create(summary_request(model, instructions, items, tokens_max), "chat")
    )
    if like is not None:
        same = {"user": like.user, "tier": like.tier, "deadline_s": like.deadline_s, "fallback": like.fallback}
        request = msgspec.structs.replace(request, **same)
    opened, answer = await asides.ask(request)
    completion = msgspec.json.decode(answer, type=_Completion)
    summary = completion.choices[0].message.content
    if not summary:
        raise EngineFailed("the model answered without a summary; use another model")
    return Summary(opened, summary, completion.usage)
