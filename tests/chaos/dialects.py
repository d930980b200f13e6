"""Clients of each dialect that lose a connection and resume as their dialect allows.

What they received in all is read by the accumulator of the dialect's official package, where there is one.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.dialects.canned import CannedAnthropic, CannedOpenAI, completion_of
from tests.dialects.fold import fold as fold_completions
from tests.dialects.responses.fold import fold as fold_responses
from tests.dialects.ui.official import Official
from tests.gateway.wire import DONE, MODEL, Exchange, Gate

RETRY_S = 0.05
QUESTION = "Tell me of rivers."
USAGE = {"stream_options": {"include_usage": True}}
_CACHED = ("cached_tokens", "cache_read_input_tokens", "inputTokenDetails")
_OF_ITS_OWN = frozenset(
    [
        "id",
        "item_id",
        "call_id",
        "created",
        "created_at",
        "createdAt",
        "completed_at",
        "toolCallId",
        "streamId",
        *_CACHED,
    ]
)
"""Fields in which two runs of one prompt differ: ids, times, and what the last replica had cached."""


@dataclass(frozen=True)
class Event:
    """One SSE event: its bytes, its ``id:`` and its data."""

    raw: bytes
    id: str | None
    data: str


def events_of(body: bytes) -> list[Event]:
    """The whole events of a body, without heartbeats."""
    found = []
    for block in body.split(b"\n\n")[:-1]:
        lines = [line for line in block.split(b"\n") if not line.startswith(b":")]
        fields = dict(line.decode().split(": ", 1) for line in lines)
        if fields.get("data") != '{"type":"ping"}' and fields.get("event") != "ping":
            found.append(Event(b"\n".join(lines) + b"\n\n", fields.get("id"), fields["data"]))
    return found


@dataclass(eq=False)
class Reader:
    """One client of one dialect. A connection that breaks is resumed at the next gateway."""

    gates: Sequence[Gate]
    body: dict[str, Any]
    path: str
    dialect: Dialect
    stream: str = ""
    kept: list[Event] = field(default_factory=list)
    """Events that are applied: a resume goes on after them."""
    cut: list[bytes] = field(default_factory=list)
    """Bytes of each connection that broke."""
    key: str = field(default_factory=lambda: secrets.token_hex(8))

    async def read(self, within_s: float = 40.0) -> None:
        """Read to the stream's end, over as many connections as it takes."""
        async with asyncio.timeout(within_s):
            for number in range(1_000):
                try:
                    if await self._attempt(self.gates[number % len(self.gates)]):
                        return
                except (OSError, asyncio.IncompleteReadError):
                    await asyncio.sleep(RETRY_S)

    async def _attempt(self, gate: Gate) -> bool:
        """True: the stream's end has come. False: the gateway asks to come back later."""
        request = self.dialect.resume(self) if self.stream else ("POST", self.path, self.body, self.headers)
        async with gate.open(*request) as exchange:
            if exchange.status in (429, 503):
                return False
            assert exchange.status == 200, (exchange.status, request, await exchange.rest())
            self.stream = exchange.headers["x-stream-id"]
            if self.dialect.replays:
                self.kept = []
            return await self._body_of(exchange)

    @property
    def headers(self) -> dict[str, str]:
        return {"Idempotency-Key": self.key} if self.dialect.name != "vercel.ui" else {}

    async def _body_of(self, exchange: Exchange) -> bool:
        before, data = len(self.kept), b""
        try:
            while piece := await exchange.piece(within_s=40.0):
                data += piece
                found = events_of(data)
                # An event without an id is a part of the frame whose id follows
                last = max((at for at, event in enumerate(found, 1) if event.id or not self.dialect.has_ids), default=0)
                self.kept[before:] = found[:last]
        except (OSError, asyncio.IncompleteReadError):
            self.cut.append(data)
            raise
        self.kept[before:] = events_of(data)
        return True

    @property
    def received(self) -> bytes:
        """Bytes of the events that were applied."""
        return b"".join(event.raw for event in self.kept)

    def data(self) -> list[bytes]:
        return [event.data.encode() for event in self.kept if event.data != DONE]

    @property
    def cursor(self) -> str:
        return next((event.id for event in reversed(self.kept) if event.id), "1-0")


@dataclass(frozen=True)
class Dialect:
    name: str
    path: str
    body: Callable[[dict[str, Any]], dict[str, Any]]
    """Makes a request of common settings: ``tokens``, ``seed``, and ``think``, ``tool`` or ``schema``."""
    resume: Callable[[Reader], tuple[Any, ...]]
    has_ids: bool = True
    """Whether events have ids, which are cursors."""
    replays: bool = False
    """Whether a resume begins again with the first event."""

    def reader(self, gates: Sequence[Gate], asked: dict[str, Any]) -> Reader:
        return Reader(gates, self.body(asked), self.path, self)


def _settings(asked: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "seed": asked["seed"], "ignore_eos": True, "stream": True}


def _chat_like(asked: dict[str, Any]) -> dict[str, Any]:
    body = _settings(asked) | USAGE | {"max_tokens": asked["tokens"]}
    body["messages"] = [{"role": "user", "content": QUESTION}]
    if asked.get("think"):
        body["reasoning_effort"] = "low"
    if schema := asked.get("tool"):
        body["tools"] = [{"type": "function", "function": {"name": "plan", "parameters": schema}}]
        body["tool_choice"] = "required"
    if schema := asked.get("schema"):
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "plan", "schema": schema}}
    return body


def _completion(asked: dict[str, Any]) -> dict[str, Any]:
    stop = {"stop": asked["stop"]} if "stop" in asked else {}
    prompt = asked.get("prompt", QUESTION)
    return _settings(asked) | USAGE | {"max_tokens": asked["tokens"], "prompt": prompt, **stop}


def _response(asked: dict[str, Any]) -> dict[str, Any]:
    body = _settings(asked) | {"max_output_tokens": asked["tokens"], "input": QUESTION}
    if asked.get("think"):
        body["reasoning"] = {"effort": "low"}
    if schema := asked.get("tool"):
        body["tools"] = [{"type": "function", "name": "plan", "parameters": schema}]
        body["tool_choice"] = "required"
    if schema := asked.get("schema"):
        body["text"] = {"format": {"type": "json_schema", "name": "plan", "schema": schema}}
    return body


def _message(asked: dict[str, Any]) -> dict[str, Any]:
    body = _settings(asked) | {"max_tokens": asked["tokens"], "messages": [{"role": "user", "content": QUESTION}]}
    if asked.get("think"):
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    if schema := asked.get("tool"):
        body["tools"] = [{"name": "plan", "input_schema": schema}]
        body["tool_choice"] = {"type": "any"}
    if schema := asked.get("schema"):
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    return body


def _page(asked: dict[str, Any]) -> dict[str, Any]:
    body = _settings(asked) | {"id": f"chat-{secrets.token_hex(6)}", "maxOutputTokens": asked["tokens"]}
    del body["stream"]
    body |= {"messages": [{"id": "u1", "role": "user", "parts": [{"type": "text", "text": QUESTION}]}]}
    body["trigger"] = "submit-message"
    if asked.get("think"):
        body["reasoning_effort"] = "low"
    if schema := asked.get("tool"):
        body["tools"] = {"plan": {"inputSchema": schema}}
        body["toolChoice"] = "required"
    return body


def _by_key(reader: Reader) -> tuple[Any, ...]:
    """The create again, with its key and the cursor."""
    headers = reader.headers | {"Last-Event-ID": reader.cursor}
    return "POST", reader.path, reader.body, headers


def _by_cursor(reader: Reader) -> tuple[Any, ...]:
    return "GET", f"/v1/streams/{reader.stream}", None, {"Last-Event-ID": reader.cursor}


def _by_number(reader: Reader) -> tuple[Any, ...]:
    number = json.loads(reader.data()[-1])["sequence_number"]
    return "GET", f"{reader.path}/{reader.stream}?stream=true&starting_after={number}"


def _by_chat(reader: Reader) -> tuple[Any, ...]:
    return "GET", f"{reader.path}/{reader.body['id']}/stream"


CHAT = Dialect("openai.chat", "/v1/chat/completions", _chat_like, _by_key)
COMPLETIONS = Dialect("openai.completions", "/v1/completions", _completion, _by_cursor)
RESPONSES = Dialect("openai.responses", "/v1/responses", _response, _by_number, has_ids=False)
OPEN_RESPONSES = Dialect("open.responses", "/v1/open/responses", _response, _by_number, has_ids=False)
MESSAGES = Dialect("anthropic.messages", "/v1/messages", _message, _by_cursor)
PAGES = Dialect("vercel.ui", "/v1/ui/chat", _page, _by_chat, has_ids=False, replays=True)
DIALECTS = (CHAT, COMPLETIONS, RESPONSES, OPEN_RESPONSES, MESSAGES, PAGES)


class Accumulators:
    """The accumulators of the official packages for Python and Node, and our own where there is none."""

    def __init__(self) -> None:
        self._openai = CannedOpenAI()
        self._messages = CannedAnthropic()
        self._pages = Official()

    def final(self, reader: Reader) -> Any:
        """The whole answer that the reader's client has in the end, without what differs between two runs."""
        return _common(self._built(reader))

    def _built(self, reader: Reader) -> Any:
        body = reader.received
        match reader.dialect.name:
            case "openai.chat":
                return completion_of(self._openai, body)
            case "openai.completions":
                return fold_completions(reader.data())
            case "openai.responses":
                assert fold_responses(reader.data())
                return self._openai.response(body).to_dict()
            case "open.responses":
                return fold_responses(reader.data())
            case "anthropic.messages":
                return self._messages.message(body).model_dump()
        return [self._page(version, reader) for version in (6, 7)]

    def _page(self, version: int, reader: Reader) -> Any:
        """The page's message: of the half that had come, and of the replay in its place."""
        if not reader.cut:
            told = self._pages.ask(version, reader.received)
            assert told["status"] == "ready", told
            return told["messages"]
        half = b"".join(event.raw for event in events_of(reader.cut[0]))
        replay = reader.received.decode()
        (found,) = self._pages.ask(version, half, how="resumed", replay=replay, atTheEnd=True)
        status, messages = found
        assert status == "ready", found
        return messages

    def close(self) -> None:
        for each in (self._openai, self._messages, self._pages):
            each.close()


def _common(value: Any) -> Any:
    if isinstance(value, dict):
        if "cache_read_input_tokens" in value:  # Anthropic's count of the prompt is without them
            value = value | {"input_tokens": value["input_tokens"] + (value["cache_read_input_tokens"] or 0)}
        return {name: _common(item) for name, item in value.items() if name not in _OF_ITS_OWN}
    return [_common(item) for item in value] if isinstance(value, list) else value
