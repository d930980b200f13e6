"""Takes inputs of running streams, from any gateway: checks them, counts them against limits, and makes them durable.

The replica that runs the stream applies them (``inference.agent.steering``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from stream_fabric.accounts.account import Admitted
from stream_fabric.errors import (
    ContextLengthExceeded,
    IdempotencyMismatch,
    NotFound,
    SteeringUnsupported,
    StreamGwError,
    TooMany,
    TooManyPendingInputs,
)
from stream_fabric.limits import INPUTS_BYTES_MAX, INPUTS_MAX, INPUTS_PENDING_MAX
from stream_fabric.stream.ids import StreamId
from stream_fabric.stream.log import InputCode, Page
from stream_gw.auth import Principal
from stream_gw.dialects.context import least_tokens, told_context
from stream_gw.dialects.facts import StreamFacts
from stream_gw.privacy.prompt_moderation import moderate_input
from stream_gw.streams.admission import limited_input
from stream_gw.streams.checks.media import check_media
from stream_gw.streams.follow import StreamReads
from stream_gw.streams.parts import GatewayParts
from stream_gw.streams.steering.items import check_input_id, user_message

_PROMPT = re.compile(rb'"kind":"prompt","prompt_tokens":(\d+)')
_BYTES_PER_TOKEN = 4
InputResult = Literal["accepted", "duplicate", "terminal"]
ANSWERS: dict[InputCode, InputResult] = {
    InputCode.ACCEPTED: "accepted",
    InputCode.DUPLICATE: "duplicate",
    InputCode.TERMINAL: "terminal",
}


class _Sizes(NamedTuple):
    """Tokens of the prompt of a stream's next answer, as far as known, and whether it has had an input."""

    tokens: int
    had_input: bool


class StreamInputs:
    """``on_result`` is called with the result of each input, or the code of its error."""

    def __init__(self, parts: GatewayParts, reads: StreamReads, on_result: Callable[[str], None]) -> None:
        self._parts = parts
        self._log = parts.log
        self._reads = reads
        self._on_result = on_result

    async def add(self, who: Principal, stream: str, input_id: str, item: Any) -> InputResult:
        """Add an item to the stream's durable inputs, once per ``input_id``. Raises StreamGwError."""
        at_us = self._parts.clock.now_us()
        try:
            result = await self._add(who, stream, input_id, item, at_us)
        except StreamGwError as error:
            self._on_result(error.code)
            raise
        self._on_result(result)
        return result

    async def _add(self, who: Principal, stream: str, input_id: str, item: Any, at_us: int) -> InputResult:
        who.require("input")
        check_input_id(input_id)
        authenticator = self._parts.authenticator
        ended = authenticator.reason_to_end(who, self._parts.unix_s())
        if ended is not None:  # revoked while the input came in, or waited for those before it
            raise ended
        records = authenticator.keys
        page, meta = await self._reads.read_head(who, stream, "input")
        check_steerable(meta.facts)
        message = user_message(item)
        check_media(msgspec.Raw(b'{"messages":' + bytes(message) + b"}"), self._parts.settings.media_domains)
        if page.status != "live" and not await self._log.inputs(StreamId(stream)):
            return "terminal"
        sizes = await self._sizes(StreamId(stream), page)
        await self._check_context(meta.facts, sizes, message)
        subjects = records.subjects(who, meta.user, meta.facts.model)
        tokens = sizes.tokens + len(bytes(message)) // _BYTES_PER_TOKEN
        if subjects:
            reply = await self._parts.accounts.add(who.tenant, StreamId(stream), subjects, 1, tokens, self._call())
            if not isinstance(reply, Admitted):
                known = await self._log.inputs(StreamId(stream))
                if any(stored.id == input_id for stored in known):  # sent again: it was counted before
                    code = await self._log.input(StreamId(stream), who.tenant, input_id, message, at_us)
                    return _answer(code, stream, input_id)
                self._parts.on_limited(subjects[reply.subject].name.partition(":")[0], reply.kind)
                raise limited_input(subjects, reply, tokens)
        code = InputCode.NONE
        try:
            await moderate_input(self._parts.moderator, records.plan(who.tenant), message)
            while code is InputCode.NONE:
                code = await self._log.input(StreamId(stream), who.tenant, input_id, message, at_us)
                if code is InputCode.NONE:  # the stream was lost after the look; or it is gone, which raises
                    await self._reads.read_head(who, stream, "input")
        finally:
            if subjects and code is not InputCode.ACCEPTED:
                await self._parts.accounts.add(who.tenant, StreamId(stream), subjects, -1, -tokens, self._call())
        return _answer(code, stream, input_id)

    def _call(self) -> str:
        return self._parts.random.token_hex(8)

    async def _sizes(self, stream: StreamId, page: Page) -> _Sizes:
        """Estimate the prompt of the next answer, from the prompts that the engine has counted and all output."""
        _, used = await self._log.settled(stream) or (None, None)
        tokens = next_prompt_tokens(page.structure, 0 if used is None else used.output)
        return _Sizes(tokens, b'"kind":"input"' in page.structure)

    async def _check_context(self, facts: StreamFacts, sizes: _Sizes, message: msgspec.Raw) -> None:
        """Raise ContextLengthExceeded if the next prompt certainly exceeds the model's context: the engine would fail
        the running stream."""
        directory = self._parts.directory
        try:
            context = directory.context(await directory.pool_of(facts.model), facts.model)
        except (NotFound, StreamGwError):  # no replica serves the model now: the one that runs the stream decides
            return
        content = msgspec.json.decode(message)["content"]
        added = least_tokens(content) if isinstance(content, str) else 0
        needed = added + (0 if sizes.had_input else sizes.tokens)
        if context and needed >= context:
            raise ContextLengthExceeded(
                f"{told_context(context)}, and the conversation with this input takes at least {needed}; send a "
                "shorter input",
                param="item",
            )


def next_prompt_tokens(structure: bytes, output_tokens: int) -> int:
    """Return the least tokens of a stream's next prompt, less those of the input that asks for it.

    The newest prompt holds the answers before it, so their output does not count again.
    """
    prompts = [int(tokens) for tokens in _PROMPT.findall(structure)]
    return max(prompts[-1], prompts[0] + output_tokens) if prompts else output_tokens


def check_steerable(facts: StreamFacts) -> None:
    """Raise SteeringUnsupported for a stream that can take no input."""
    if facts.kind != "chat":
        raise SteeringUnsupported("only streams of a chat take inputs; this one has no messages")
    if facts.n != 1:
        raise SteeringUnsupported(f"a stream with {facts.n} choices takes no input; ask for one choice")


def _answer(code: InputCode, stream: str, input_id: str) -> InputResult:
    match code:
        case InputCode.TOO_MANY:
            raise TooMany(f"stream {stream} has {INPUTS_MAX} inputs, the most it may have; create another stream")
        case InputCode.TOO_MANY_WAIT:
            raise TooManyPendingInputs(
                f"{INPUTS_PENDING_MAX} inputs of stream {stream} wait to be applied, the most that may; retry soon"
            )
        case InputCode.TOO_LARGE:
            raise TooMany(
                f"inputs of stream {stream} would exceed {INPUTS_BYTES_MAX} bytes; send less, or create another stream"
            )
        case InputCode.OTHER_ITEM:
            raise IdempotencyMismatch(f"the id {input_id[:64]!r} was used for another input of stream {stream}")
    return ANSWERS[code]
