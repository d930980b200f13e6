"""An answer of a model server while it comes, whatever way its bytes take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class AnswerBroken(ConnectionError):
    """The connection failed, or the server did not keep to the protocol."""


class Way(Protocol):
    """Carries an answer: an HTTP connection, or one number of the step socket."""

    def leave(self, answer: Answer) -> None:
        """Forget an answer that is closed. The server is told if it may still send."""

    def drain(self, answer: Answer) -> None:
        """Pass over the rest of an answer whose reader has all it needs."""

    def fail(self, error: BaseException) -> None:
        """Let the answer fail, and tell the server that nobody reads it."""


class Answer:
    """One answer, read by one task: ``status`` and ``headers`` (lower-case names), then the body once.

    ``silence_s``: the answer fails when the server sends nothing for this time.
    """

    def __init__(self, way: Way, silence_s: float) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._way = way
        self._silence_s = silence_s
        self._held: list[bytes] = []
        """Pieces that came before there was a reader."""
        self._receive: Callable[[bytes], bool] | None = None
        self._over = False
        self.closed = False
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self.heard_at = self._loop.time()
        """Time of the last bytes, on the loop's clock."""
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(silence_s, self._check_silence)

    async def wait_head(self) -> None:
        while not self.status:
            await self._wait()

    async def deliver(self, receive: Callable[[bytes], bool]) -> None:
        """Give the body's pieces to ``receive`` until the body ends or ``receive`` returns True: it needs no more.

        Raises OSError when the answer breaks off, and what ``receive`` raises.
        """
        self._receive = receive
        held, self._held = self._held, []
        for piece in held:
            if receive(piece):
                self._over = True
                self._way.drain(self)
                return
        while not self._over:
            await self._wait()

    async def read_start(self, bytes_max: int) -> bytes:
        """Return at most the first ``bytes_max`` bytes of the body. Raises OSError when the answer breaks off."""
        body = bytearray()

        def receive(piece: bytes) -> bool:
            body.extend(piece)
            return len(body) >= bytes_max

        await self.deliver(receive)
        return bytes(body[:bytes_max])

    def close(self) -> None:
        """End the reading at once; closes the connection unless the answer was read to its end."""
        if self.closed:
            return
        self.closed = True
        self.stop_watch()
        self._receive = None  # it knows its request, which knows this answer: nobody would free the two
        self._way.leave(self)

    def stop_watch(self) -> None:
        """Watch for the server's silence no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self) -> None:
        """Wait until something has changed. Raises what made the answer fail."""
        if self._error is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail_if_silent(self, for_s: float) -> None:
        """Fail if the server has sent nothing for this time."""
        if self._loop.time() - self.heard_at >= for_s:
            self._way.fail(TimeoutError(f"it stops, and sent nothing for {for_s:g} s"))

    def _check_silence(self) -> None:
        left_s = self.heard_at + self._silence_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_silence)
        else:
            self._way.fail(TimeoutError(f"it sent nothing for {self._silence_s:g} s"))

    # --- what its way tells ----------------------------------------------------------------------------------

    def on_head(self, status: int) -> None:
        self.status = status
        self._wake()

    def on_piece(self, piece: bytes) -> bool:
        """Take a piece of the body. True: the reader needs no more."""
        if self._receive is None:
            self._held.append(piece)
            return False
        if self._receive(piece):
            self.on_end()
            return True
        return False

    def on_end(self) -> None:
        self._over = True
        self.stop_watch()
        self._wake()

    def on_failure(self, error: BaseException) -> None:
        if not self._over:
            self._error = error
            self._wake()
