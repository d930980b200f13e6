"""Clients that lose connections and go on elsewhere, and what an answer is compared by."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from stream_gw.client import Data, GatewayError, Stream, StreamGateway
from stream_gw.client.gateway import State
from tests.gateway.wire import DONE, Exchange, Gate, chat, text_of_chunks, whole_events
from tests.support.waiting import eventually

RETRY_S = 0.05


@dataclass(frozen=True)
class Answer:
    """The response that one prompt and seed always give."""

    text: str
    finish_reason: str | None
    output_tokens: int


def body(seed: int, tokens: int, **more: Any) -> dict[str, Any]:
    return chat(tokens, seed, stream_options={"include_usage": True}, **more)


class Reader:
    """A client's result: the chunks, times and terminal that it received."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.stream = ""
        self.chunks: list[Any] = []
        self.heard_at: list[float] = []
        """When something of the stream came, by the loop's clock."""
        self.connected_at: list[float] = []
        self.ended_at = 0.0
        self.status: str | None = None
        self.error: dict[str, Any] | None = None
        self.output_tokens = 0

    async def read(self, within_s: float = 60.0) -> None:
        """To the terminal, over as many connections as it takes."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        return text_of_chunks(self.chunks)

    @property
    def answer(self) -> Answer:
        reasons = [c["finish_reason"] for chunk in self.chunks for c in chunk["choices"] if c["finish_reason"]]
        assert len(reasons) <= 1, f"{self.stream} finished {len(reasons)} times"
        return Answer(self.text, reasons[0] if reasons else None, self.output_tokens)

    def check_whole(self, undisturbed: Answer) -> None:
        assert self.status == "completed", f"{self.stream} ended {self.status}: {self.error}"
        assert self.answer == undisturbed, f"{self.stream} differs from the undisturbed answer"

    def check_lost(self, undisturbed: Answer) -> None:
        assert self.status == "failed" and self.error is not None, f"{self.stream} ended {self.status}"
        assert self.error["code"] == "replica_lost" and self.error["retriable"] is True, self.error
        self.check_prefix(undisturbed)

    def check_prefix(self, undisturbed: Answer) -> None:
        """Check a stream that ended early: its text is a prefix of the undisturbed response."""
        assert undisturbed.text.startswith(self.text), f"{self.stream} said what the undisturbed answer does not"

    def hears(self) -> None:
        self.heard_at.append(asyncio.get_running_loop().time())

    def again_after(self, moment: float) -> float | None:
        """Seconds from ``moment`` to the first news over a connection that was made later; None: had ended by then."""
        connected = next((at for at in self.connected_at if at > moment), None)
        if connected is None:
            return None
        return next((at - moment for at in self.heard_at if at >= connected), None)


class SseReader(Reader):
    """SSE on a bare socket. An event counts once the id of its frame has come, so that a cut leaves no half frame."""

    def __init__(self, gates: Sequence[Gate], seed: int, tokens: int, **more: Any) -> None:
        super().__init__(seed)
        self._gates = list(gates)
        self._at = 0
        self._body = body(seed, tokens, **more)
        self._key = uuid.uuid4().hex
        self.cursor = "1-0"
        self._last = (1, 0)
        self.refused = 0

    async def read(self, within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while self.status is None:
                try:
                    await self._attempt(self._gates[self._at % len(self._gates)])
                except (OSError, asyncio.IncompleteReadError, _Refused):
                    self._at += 1
                    await asyncio.sleep(random.uniform(RETRY_S / 2, RETRY_S))
        self.ended_at = asyncio.get_running_loop().time()

    def leave(self) -> None:
        """Ask the next gateway next time."""
        self._at += 1

    async def _attempt(self, gate: Gate) -> None:
        async with gate.connection() as exchange:
            if self.stream:
                await exchange.send(gate.request("GET", f"/v1/streams/{self.stream}?after={self.cursor}"))
            else:
                headers = {"Idempotency-Key": self._key}
                await exchange.send(gate.request("POST", "/v1/chat/completions", self._body, headers))
            await exchange.head()
            if exchange.status in (429, 503):
                self.refused += 1
                raise _Refused
            assert exchange.status == 200, (exchange.status, self.stream, self.cursor, await exchange.rest())
            self.stream = exchange.headers["x-stream-id"]
            self.connected_at.append(asyncio.get_running_loop().time())
            await self._body_of(exchange)

    async def _body_of(self, exchange: Exchange) -> None:
        data = b""
        waiting: list[str] = []
        while piece := await exchange.piece(within_s=60.0):
            data += piece
            found = whole_events(data)
            if not found:
                continue
            data = data[found[-1].end :]
            self.hears()
            for event in found:
                waiting.append(event.data)
                if event.id is not None:
                    self._apply(event.id, waiting)
                    waiting = []
        if waiting and self.status is None:
            # An error without an id is this gateway's, not a frame of the stream: it says where to go on
            error = msgspec.json.decode(waiting[-1]).get("error", {})
            assert error.get("retriable") and error["cursor"] == self.cursor, (self.stream, self.cursor, waiting)
            raise _Refused
        # A body that ends well without its end would make a cut stream look whole: invariant 4
        assert self.status is not None, f"{self.stream} ended after {self.cursor} without a terminal"

    def _apply(self, cursor: str, events: list[str]) -> None:
        epoch, _, seq = cursor.partition("-")
        position = int(epoch), int(seq)
        assert self.status is None, f"{self.stream} goes on after its terminal"
        assert position > self._last, f"invariant 3: {cursor} after {self._last}"
        self._last, self.cursor = position, cursor
        for data in events:
            if data == DONE:
                self.status = "completed"
                continue
            chunk = msgspec.json.decode(data)
            if "error" in chunk:
                self.error = chunk["error"]
                self.status = "cancelled" if chunk["error"]["code"] == "cancelled" else "failed"
                continue
            if usage := chunk.get("usage"):
                self.output_tokens = usage["completion_tokens"]
            self.chunks.append(chunk)


class _Refused(Exception):
    """The gateway asks to come back later."""


@asynccontextmanager
async def python_clients(gates: Sequence[Gate], seeds: Sequence[int], tokens: int) -> AsyncIterator[list[SocketReader]]:
    """A stream for each seed over the Python client, ten a socket, all beginning on the first gateway."""
    async with AsyncExitStack() as stack:
        readers: list[SocketReader] = []
        loop = asyncio.get_running_loop()
        for first in range(0, len(seeds), 10):
            connected_at: list[float] = []

            def on_state(state: State, error: GatewayError | None, at: list[float] = connected_at) -> None:
                if state == "connected":
                    at.append(loop.time())

            client = StreamGateway([gate.url for gate in gates], token=gates[0].key, on_state=on_state)
            await stack.enter_async_context(client)
            readers += [SocketReader(client, connected_at, seed, tokens) for seed in seeds[first : first + 10]]
        yield readers


async def until_running(readers: Sequence[Reader], heard: int = 5, within_s: float = 30.0) -> None:
    await eventually(lambda: all(len(r.heard_at) >= heard for r in readers), "every stream to run", within_s)


class SocketReader(Reader):
    """The Python client's stream."""

    def __init__(self, gateway: StreamGateway, connected_at: list[float], seed: int, tokens: int, **more: Any) -> None:
        super().__init__(seed)
        self.connected_at = connected_at
        self._source: Stream = gateway.create(body(seed, tokens, **more), key=uuid.uuid4().hex)

    async def read(self, within_s: float = 60.0) -> None:
        seq = 0
        try:
            async with asyncio.timeout(within_s):
                async for item in self._source:
                    self.hears()
                    assert isinstance(item, Data), f"{self.stream}: {item}"
                    assert item.seq > seq, "invariant 3"
                    seq = item.seq
                    self.chunks += item.chunks
                    self.stream = self._source.id or ""
        except GatewayError as error:
            self.error = {"code": error.code, "message": error.message, "retriable": error.retriable}
        self.stream = self._source.id or ""
        self.ended_at = asyncio.get_running_loop().time()
        self.status = self._source.status
        if self._source.usage:
            self.output_tokens = self._source.usage["output"]


def share(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def figures(values: Sequence[float]) -> str:
    return f"p50 {share(values, 0.5) * 1e3:.1f} ms, p99 {share(values, 0.99) * 1e3:.1f} ms, n {len(values)}"
