"""Redaction off the event loop: one thread, a bounded number of waiting texts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from stream_fabric.limits import REDACTIONS_MAX
from stream_gw.privacy.redaction import MARGIN_BYTES


class Redactor:
    """Redacts prompts and completions in a thread of its own."""

    margin_bytes = MARGIN_BYTES

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._waiting = 0

    @property
    def full(self) -> bool:
        """True while as many texts wait as may; then content is not stored."""
        return self._waiting >= REDACTIONS_MAX

    async def redact(
        self, body: bytes | msgspec.Raw | None, fields: tuple[str, ...], completion: str, bytes_max: int
    ) -> tuple[str, str]:
        """Return prompt and completion without secrets and personal data, each of at most ``bytes_max`` bytes."""

        def work() -> tuple[str, str]:
            # With its first text: the patterns and the rules of phone numbers take 70 ms to load
            from stream_gw.privacy.redaction.redact import redacted, redacted_prompt

            prompt = "" if body is None else redacted_prompt(body, fields, bytes_max)
            return prompt, redacted(completion, bytes_max)

        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._waiting -= 1


@contextlib.asynccontextmanager
async def open_redactor() -> AsyncIterator[Redactor]:
    """Start the thread; it ends with the context."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="redaction")
    try:
        yield Redactor(executor)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
