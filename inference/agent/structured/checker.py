"""Checks replies in a child process, off the event loop and within a bound."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from inference.agent.structured.worker import question
from stream_fabric.limits import CHECK_S_MAX, CHECK_WAIT_S_MAX, CHECKS_WAITING_MAX, SCHEMA_BYTES_MAX, SCHEMAS_KEPT
from stream_fabric.process.death_signal import die_with_parent
from stream_fabric.stream.frames import Check

log = logging.getLogger(__name__)

OnChecked = Callable[[str], None]
"""Gets the result of each reply: valid, invalid, repaired or unchecked. ``repair``: one is made again."""
_decoder = msgspec.json.Decoder(Check)
_START_S_MAX = 30.0


class Checker(Protocol):
    """Checks replies against JSON schemas."""

    on_result: OnChecked

    async def check(self, schema: bytes, reply: str, tenant: str) -> Check:
        """Return whether the reply fits the schema. Never fails: what cannot be checked is ``unchecked``."""


class _Asker:
    """A tenant whose replies wait or are being checked."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.replies = 0


class ReplyChecker:
    """Asks one child process, one question at a time. It starts with the first question and again after a failure.

    Tenants take turns: the slow schemas of one hold up a reply of another for one check at most.
    """

    def __init__(self, on_result: OnChecked) -> None:
        self.on_result = on_result
        self._child: asyncio.subprocess.Process | None = None
        self._killed: asyncio.subprocess.Process | None = None
        """A child that was killed and may not have ended yet."""
        self._turn = asyncio.Lock()
        self._askers: dict[str, _Asker] = {}
        self._too_slow: OrderedDict[bytes, None] = OrderedDict()
        """Digests of the schemas whose check took too long."""

    async def check(self, schema: bytes, reply: str, tenant: str) -> Check:
        if len(schema) > SCHEMA_BYTES_MAX:
            return Check("unchecked", reason=f"the schema has {len(schema)} bytes; the limit is {SCHEMA_BYTES_MAX}")
        digest = hashlib.blake2b(schema, digest_size=16).digest()
        if digest in self._too_slow:
            return _too_slow()
        asker = self._askers.setdefault(tenant, _Asker())
        if asker.replies >= CHECKS_WAITING_MAX:
            return Check("unchecked", reason=f"{CHECKS_WAITING_MAX} replies wait for their check already")
        asker.replies += 1
        try:
            async with contextlib.AsyncExitStack() as turns:
                try:
                    async with asyncio.timeout(CHECK_WAIT_S_MAX):
                        await turns.enter_async_context(asker.turn)
                        await turns.enter_async_context(self._turn)
                except TimeoutError:
                    return Check("unchecked", reason=f"it waited {CHECK_WAIT_S_MAX:g} s for its check")
                return await self._ask(schema, digest, reply.encode("utf-8", "replace"))
        finally:
            asker.replies -= 1
            if not asker.replies:
                del self._askers[tenant]

    async def _ask(self, schema: bytes, digest: bytes, reply: bytes) -> Check:
        """Ask the child. A child that fails, or whose caller leaves, is killed: its answer would come to the next."""
        answered = False
        try:
            child = await self._started()
            assert child.stdin is not None and child.stdout is not None
            async with asyncio.timeout(CHECK_S_MAX):
                child.stdin.write(question(schema, reply))
                await child.stdin.drain()
                line = await child.stdout.readline()
            check = _decoder.decode(line)
            answered = True
        except TimeoutError:
            log.warning("check of a reply takes too long, its schema is not checked again: s=%g", CHECK_S_MAX)
            self._too_slow[digest] = None
            while len(self._too_slow) > SCHEMAS_KEPT:
                self._too_slow.popitem(last=False)
            return _too_slow()
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("checking process failed, it starts again with the next reply: error=%r", error)
            return Check("unchecked", reason="the checking process failed")
        finally:
            if not answered:
                self._kill()
        return check

    async def _started(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            await self._reap()
            module = "inference.agent.structured.worker"
            try:
                async with asyncio.timeout(_START_S_MAX):
                    self._child = await asyncio.create_subprocess_exec(
                        sys.executable, "-m", module, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                        preexec_fn=die_with_parent(),  # it sees the end of its stdin between two checks only
                    )  # fmt: skip
                    await self._warm_up(self._child)
            except TimeoutError:
                raise OSError(f"the checking process did not start within {_START_S_MAX:g} s") from None
        return self._child

    async def _warm_up(self, child: asyncio.subprocess.Process) -> None:
        """Wait until the child answers, so that its start does not count as the check's time."""
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(question(b"true", b"0"))
        await child.stdin.drain()
        if not await child.stdout.readline():
            raise OSError("the checking process ended at its start")

    def _kill(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
            self._killed, self._child = self._child, None

    async def _reap(self) -> None:
        """Wait for the end of a child that was killed."""
        if self._killed is not None:
            await self._killed.wait()
            self._killed = None

    async def close(self) -> None:
        """End the child."""
        self._kill()
        await self._reap()


def _too_slow() -> Check:
    return Check("unchecked", reason=f"the check takes longer than {CHECK_S_MAX:g} s; simplify the schema")


@contextlib.asynccontextmanager
async def open_checker(on_result: OnChecked) -> AsyncIterator[ReplyChecker]:
    """Make the checker; its process ends with the context."""
    checker = ReplyChecker(on_result)
    try:
        yield checker
    finally:
        await checker.close()
