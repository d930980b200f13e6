"""Makes the request for a response fit the model's context, where the client allows it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from stream_fabric.errors import ContextLengthExceeded, StreamGwError, Unsupported
from stream_fabric.limits import COMPACTION_KEPT_BYTES_MAX, COMPACTION_TOKENS_MAX
from stream_gw.auth import Principal, pinned_regions
from stream_gw.dialects.context import told_context
from stream_gw.dialects.requests import CreateRequest
from stream_gw.dialects.responses.requests import OPENAI, Asked
from stream_gw.dialects.responses.truncation import Cuttable, input_limit
from stream_gw.responses import Item, ResponseStore, window_of
from stream_gw.streams.context.asides import Asides
from stream_gw.streams.context.summary import summarised
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.off_loop import off_loop
from stream_gw.streams.stored_responses import Prepared

_SLACKS = (0.0, 0.1, 0.25)
"""Share of the limit that each further cut leaves free, because tokens do not follow from bytes. Each is counted."""
_COMPACT_SHARE = 75
"""Percentage of the context from which on a conversation is compacted, where the client names no threshold."""
_SUMMARY_SHARE, _SUMMARY_TOKENS = 4, 256
"""A summary has at most a quarter of the threshold, but may have 256 tokens."""
_TEMPLATE_TOKENS = 512
"""Tokens that a template may add to a prompt, beside what it writes for the JSON of each message."""
_GUESSED_BYTES_PER_TOKEN = 3
"""For engines that cannot count."""
_PARTS = ("image_url", "input_audio", "file")
"""Types of parts whose tokens do not follow from their bytes."""


class Counts(Protocol):
    """Counts the tokens of prompts."""

    async def count(self, request: CreateRequest) -> int | None:
        """Return the tokens of a chat's prompt as the engine counts them; None: the engine cannot count."""


async def fitted(gateway: Gateway, who: Principal, prepared: Prepared, dialect: str, asides: Asides) -> CreateRequest:
    """Return the request to create the stream of a response, made to fit the model's context as the client allows.

    The conversation is compacted first, and truncated if it still exceeds the context. Raises BadRequest,
    ContextLengthExceeded, and what creating a stream raises.
    """
    asked, history = prepared.expanded, prepared.history
    size = sum(map(len, asked.fields.values())) + history.size
    request = await off_loop(size, lambda: asked.request(history, dialect))
    if not asked.truncates and asked.compacting is None:
        return request
    context = await _context(gateway, who, request.model)
    prompt = Prompt(request, asked, [*history, *asked.items], size)
    if asked.compacting is not None:
        threshold = asked.compacting.threshold or context * _COMPACT_SHARE // 100
        store = gateway.parts.responses
        if dialect != OPENAI or store is None:
            raise Unsupported(
                "context_management works with POST /v1/responses of a gateway that stores responses; call "
                "POST /v1/responses/compact, or leave it out",
                param="context_management",
            )
        if threshold and not _surely_fits(request, threshold):
            prompt = await _compacted(prompt, store, who, dialect, asides, threshold)
    limit = input_limit(context, request.max_tokens)
    if not asked.truncates or not context or _surely_fits(prompt.request, limit):
        return prompt.request
    return await Fitting(prompt, dialect, asides, context, limit).cut()


class Prompt(NamedTuple):
    """A request, and the items of which its prompt is made."""

    request: CreateRequest
    asked: Asked
    items: list[Item]
    size: int
    """Bytes of the items, about."""

    def cuttable(self, *, keeps_summaries: bool = True) -> Cuttable:
        tools = self.asked.fields.get("tools", msgspec.Raw(b"[]"))
        return Cuttable(self.items, self.asked.instructions, tools, keeps_summaries=keeps_summaries)


async def _context(gateway: Gateway, who: Principal, model: str) -> int:
    """Return the maximum context of a model in tokens; 0: unknown. Raises like the create of a stream."""
    who.require("create")
    parts = gateway.parts
    records = parts.authenticator.keys
    regions = pinned_regions(records.regions(who))
    pool = await parts.directory.pool_of(model, records.allowed_models(who.tenant, who.models), regions)
    return parts.directory.context(pool, model, regions)


def _surely_fits(request: CreateRequest, limit: int) -> bool:
    """Whether every tokenizer writes the prompt in ``limit`` tokens: a token of a text takes a byte at least."""
    if request.prompt_bytes + _TEMPLATE_TOKENS > limit:
        return False
    return not any(b'"type":"%b"' % name.encode() in part for part in request.prompt for name in _PARTS)


async def _compacted(
    prompt: Prompt, store: ResponseStore, who: Principal, dialect: str, asides: Asides, threshold: int
) -> Prompt:
    """Return the prompt with its older items summarised, if it has more than ``threshold`` tokens."""
    request, asked = prompt.request, prompt.asked
    whole = await off_loop(prompt.size, lambda: prompt.cuttable(keeps_summaries=False))
    if not whole.groups:
        return prompt
    tokens = await _tokens(asides, request, whole, 0)
    old, kept = whole.left_out(len(whole.groups)), whole.kept(len(whole.groups))
    if tokens <= threshold or len(msgspec.json.encode(kept)) > COMPACTION_KEPT_BYTES_MAX:
        return prompt
    # One of more tokens would soon be summarised again
    tokens_max = min(COMPACTION_TOKENS_MAX, max(_SUMMARY_TOKENS, threshold // _SUMMARY_SHARE))
    try:
        summary = await summarised(asides, request.model, asked.instructions, old, prompt.size, tokens_max, request)
    except StreamGwError as error:
        if asked.truncates and error.code == ContextLengthExceeded.code:
            return prompt  # too long even to be summarised
        raise
    items = window_of(kept, summary.text)
    shorter = msgspec.structs.replace(asked, items=items)
    made = await off_loop(prompt.size, lambda: shorter.request([], dialect))
    sealed = await off_loop(prompt.size, lambda: store.seals.seal_window(who.tenant, items))
    # No two summaries of a model are the same
    return Prompt(msgspec.structs.replace(made, compaction=sealed, asked=asked.sent), shorter, items, prompt.size)


async def _tokens(counts: Counts, request: CreateRequest, whole: Cuttable, count: int) -> int:
    """Return the tokens of the prompt of ``request``, which lacks ``count`` groups."""
    tokens = await counts.count(request)
    return max(1, whole.weight(count) // _GUESSED_BYTES_PER_TOKEN if tokens is None else tokens)


class Fitting:
    """One request on its way into ``limit`` tokens of a context."""

    def __init__(self, prompt: Prompt, dialect: str, counts: Counts, context: int, limit: int) -> None:
        self._prompt = prompt
        self._dialect = dialect
        self._counts = counts
        self._context = context
        self._limit = limit

    async def cut(self) -> CreateRequest:
        """Return the request without as many of the oldest items as needed. Raises ContextLengthExceeded."""
        size = self._prompt.size
        whole = await off_loop(size, self._prompt.cuttable)
        count = await off_loop(size, lambda: whole.certain(self._limit))
        made, tokens = await self._counted(whole, count)
        for slack in _SLACKS:
            if tokens <= self._limit or count == len(whole.groups):
                break
            count = whole.next_cut(count, tokens, self._limit * (1 - slack))
            made, tokens = await self._counted(whole, count)
        if tokens > self._limit and count < len(whole.groups):
            return await self._without(whole, len(whole.groups))  # the engine is the judge
        if tokens >= self._context:
            raise ContextLengthExceeded(
                f"{told_context(self._context)}, and what truncation keeps of the input takes {tokens}: instructions, "
                "system messages, the last user message and what came last; shorten them, or use a model with a longer "
                "context",
                param="input",
            )
        return made

    async def _counted(self, whole: Cuttable, count: int) -> tuple[CreateRequest, int]:
        """Return the request without ``count`` groups, and the tokens of its prompt."""
        made = await self._without(whole, count)
        return made, await _tokens(self._counts, made, whole, count)

    async def _without(self, whole: Cuttable, count: int) -> CreateRequest:
        request = self._prompt.request
        if not count:
            return request
        kept = whole.kept(count)
        asked, left_out = msgspec.structs.replace(self._prompt.asked, items=kept), len(whole.items) - len(kept)
        made = await off_loop(self._prompt.size, lambda: asked.request([], self._dialect, left_out=left_out))
        return msgspec.structs.replace(made, compaction=request.compaction, asked=request.asked)
