"""The agent's side of the step socket: a vLLM with stream-gw's plug-in sends here what one of its loop turns made.

``inference/engines/plugin/stream_gw_steps.py`` is the other side, and describes the records.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Final, cast

import msgspec

from inference.engines.plugin.stream_gw_steps import (
    ASK,
    BODY,
    BROKEN,
    END,
    HEAD,
    HELLO,
    LEAVE,
    RECORD,
    VERSION,
    Records,
)
from inference.engines.upstream.answer import Answer, AnswerBroken
from stream_fabric.errors import EngineFailed

log = logging.getLogger(__name__)

_NUMBERS: Final = 1 << 32
_FIRST_S: Final = 2.0
"""Time for a first API server to connect, at the start."""


class _Head(msgspec.Struct):
    status: int
    headers: dict[str, str]


_head_decoder = msgspec.json.Decoder(_Head)


class StepSocket:
    """Listens at a Unix socket and asks the API servers that connect to it.

    ``headers`` go with every request. ``silence_s``: an answer fails when nothing of it comes for this time.
    """

    def __init__(self, path: str, headers: Mapping[str, str], *, silence_s: float) -> None:
        self.path = path
        self._headers = list(headers.items())
        self._silence_s = silence_s
        self._server: asyncio.Server | None = None
        self._open: set[_Link] = set()
        self._links: set[_Link] = set()
        """The open connections of plug-ins that speak our version."""
        self._greeted = asyncio.Event()

    async def listen(self) -> None:
        """Listen, so that an API server that starts later connects at its first try.

        Raises EngineFailed for a path that cannot be used.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_unix_server(lambda: _Link(self), self.path)
        except OSError as error:  # also for a path of more than 107 bytes
            raise EngineFailed(
                f"cannot listen at {self.path} for vLLM's plug-in: {error}; name another path with --upstream-steps"
            ) from error

    async def start(self) -> None:
        """Listen, and give a first API server time to connect. Raises EngineFailed as ``listen`` does."""
        if self._server is None:
            await self.listen()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                await self._greeted.wait()
        if not self.connected:
            log.warning("vLLM's plug-in does not connect, tokens come by HTTP until it does: path=%s", self.path)

    @property
    def connected(self) -> bool:
        return bool(self._links)

    async def post(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send a request and return its answer, of which the head has come; the caller closes it. Raises OSError."""
        link = min(self._links, key=_Link.load, default=None)
        if link is None:
            raise AnswerBroken("its plug-in is not connected")
        head = msgspec.json.encode({"path": path, "headers": [*self._headers, *headers.items()]})
        answer = link.ask((head, b"\n", body), self._silence_s)
        try:
            await answer.wait_head()
        except BaseException:
            answer.close()
            raise
        return answer

    def close(self) -> None:
        """Close every connection; answers that are being read fail."""
        if self._server is not None:
            self._server.close()
            self._server = None
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        for link in list(self._open):
            link.close()

    # --- what its connections tell ---------------------------------------------------------------------------

    def on_open(self, link: _Link) -> None:
        self._open.add(link)

    def on_greeting(self, link: _Link) -> None:
        self._links.add(link)
        self._greeted.set()
        log.info("vLLM's API server connected to the step socket: path=%s servers=%d", self.path, len(self._links))

    def on_lost(self, link: _Link) -> None:
        self._open.discard(link)
        if link not in self._links:
            return
        self._links.discard(link)
        if self._server is not None:
            log.warning("vLLM's API server left the step socket: path=%s servers=%d", self.path, len(self._links))


class _Link(asyncio.Protocol):
    """The connection of one API server, with the answers that come by it."""

    def __init__(self, socket: StepSocket) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._records = Records()
        self._lanes: dict[int, _Lane] = {}
        self._last = 0

    def load(self) -> int:
        """Answers that are coming."""
        return len(self._lanes)

    def ask(self, request: Sequence[bytes], silence_s: float) -> Answer:
        while (number := (self._last + 1) % _NUMBERS) in self._lanes:
            self._last = number
        self._last = number
        lane = self._lanes[number] = _Lane(self, number, silence_s)
        self.write(number, ASK, *request)
        return lane.answer

    def write(self, number: int, kind: int, *payload: bytes) -> None:
        if self._transport is not None:
            self._transport.write(b"".join((RECORD.pack(sum(map(len, payload)), number, kind), *payload)))

    def forget(self, number: int) -> bool:
        """Take no more of an answer. False: this has come to its end before."""
        return self._lanes.pop(number, None) is not None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._socket.on_open(self)

    def data_received(self, data: bytes) -> None:
        try:
            records = self._records.receive(data)
        except ValueError as wrong:
            log.error("step socket closed, its bytes are not understood: path=%s error=%s", self._socket.path, wrong)
            self.close()
            return
        now, lanes = self._loop.time(), self._lanes
        for number, kind, payload in records:
            lane = lanes.get(number)
            if lane is None:
                self._receive_for_nobody(number, kind, payload)
                continue
            lane.answer.heard_at = now
            try:
                lane.receive(kind, payload)
            except Exception as failed:  # of one answer's reader: the other answers must not lose their tokens
                log.debug("reader of an answer failed: path=%s", self._socket.path, exc_info=failed)
                lane.fail(failed)

    def connection_lost(self, error: Exception | None) -> None:
        self._socket.on_lost(self)
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.answer.on_failure(AnswerBroken(str(error) if error is not None else "it closed the connection"))

    def _receive_for_nobody(self, number: int, kind: int, payload: bytes) -> None:
        if kind == HELLO:
            if payload == b"%d" % VERSION:
                self._socket.on_greeting(self)
            else:
                log.error(
                    "vLLM's plug-in is of another version, tokens come by HTTP: ours=%d theirs=%s", VERSION, payload[:9]
                )
        elif kind in (HEAD, BODY):  # on its way when the answer was left, or the server goes on after the end
            self.write(number, LEAVE)


class _Lane:
    """One answer's part of a connection."""

    __slots__ = ("_link", "_number", "answer")

    def __init__(self, link: _Link, number: int, silence_s: float) -> None:
        self._link, self._number = link, number
        self.answer = Answer(self, silence_s)

    def receive(self, kind: int, payload: bytes) -> None:
        answer = self.answer
        if kind == BODY:
            if answer.on_piece(payload):
                self.drain(answer)
        elif kind == HEAD:
            head = _head_decoder.decode(payload)
            answer.headers = head.headers
            answer.on_head(head.status)
        elif kind == END:
            self._link.forget(self._number)
            answer.on_end()
        elif kind == BROKEN:
            self._link.forget(self._number)
            answer.on_failure(AnswerBroken(payload.decode(errors="replace")))

    # --- Way -------------------------------------------------------------------------------------------------

    def leave(self, answer: Answer) -> None:
        if self._link.forget(self._number):
            self._link.write(self._number, LEAVE)

    def drain(self, answer: Answer) -> None:
        self._link.forget(self._number)

    def fail(self, error: BaseException) -> None:
        self.leave(self.answer)
        self.answer.on_failure(error)
