"""The outlet of an answer that is not streamed: frames are collected and encoded once."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from stream_fabric.errors import EngineFailed, StreamCancelled, StreamGwError, from_info
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import CHOICE_END_PREFIX, ChoiceEnd, End, ErrorInfo, Status, decode, is_end
from stream_fabric.stream.reader import Gap, Reset
from stream_gw.dialects.accumulate import Accumulator
from stream_gw.dialects.anthropic.whole import MessageCollector, TokenCount
from stream_gw.dialects.base import ends_cleanly
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.responses.requests import COUNT
from stream_gw.dialects.responses.whole import DIALECTS as RESPONSES
from stream_gw.dialects.responses.whole import ResponseCollector
from stream_gw.dialects.whole import WHOLE, Document

_WORST = ("", "valid", "unchecked", "invalid")
"""Results of a check, the worst one last."""


class Collected(NamedTuple):
    """Outcome of a collected response: a body, or an error, or neither when the client has gone."""

    body: bytes | None = None
    error: StreamGwError | None = None
    cursor: Cursor | None = None
    """With an error of this gateway: where the stream can be resumed."""
    checked: str = ""
    """Worst result of the checks of the choices against their schema; empty: none was checked."""


class CollectingOutlet:
    """``Outlet`` that collects a stream; ``done`` gives the outcome."""

    full = False

    def __init__(self, facts: StreamFacts) -> None:
        self._collected = _collector(facts)
        self.done: asyncio.Future[Collected] = asyncio.get_running_loop().create_future()
        self._end: End | None = None
        self._checked = ""

    def leave(self) -> None:
        """Give up: the client has gone."""
        self._set_outcome(Collected())

    # --- Outlet --------------------------------------------------------------------------------------------

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        for line in lines:
            self._collected.add(line)
            if line.startswith(CHOICE_END_PREFIX) and isinstance(frame := decode(line), ChoiceEnd) and frame.check:
                self._checked = max(self._checked, frame.check.result, key=_WORST.index)
        if is_end(lines[-1]) and isinstance(end := decode(lines[-1]), End):
            self._end = end

    def gap(self, gap: Gap) -> bool:
        return False

    def reset(self, reset: Reset) -> bool:
        return False

    def epoch_changed(self, epoch: str, head: int) -> None:
        pass

    def queued(self, position: int, of: int, warming_s: float | None) -> None:
        pass

    def end(self, status: Status) -> None:
        if status == "completed" or self._is_cut_cleanly():
            try:
                self._set_outcome(Collected(self._collected.result(), checked=self._checked))
            except StreamGwError as error:
                self._set_outcome(Collected(error=error))
            return
        recorded = None if self._end is None else self._end.error
        if recorded is None and status == "cancelled":
            self._set_outcome(Collected(error=StreamCancelled("the stream was cancelled")))
            return
        info = recorded or ErrorInfo(status, f"the stream ended with status {status}", EngineFailed.type, 502)
        self._set_outcome(Collected(error=from_info(info)))

    def _is_cut_cleanly(self) -> bool:
        """True if a budget or moderation ended the answer, and every choice says so."""
        found = self._collected
        if self._end is None or isinstance(found, Document):
            return False
        return ends_cleanly(self._end, found.has_all_reasons)

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        self._set_outcome(Collected(error=error, cursor=cursor))

    def _set_outcome(self, outcome: Collected) -> None:
        """Set the outcome, once."""
        if not self.done.done():
            self.done.set_result(outcome)


def _collector(facts: StreamFacts) -> Accumulator | MessageCollector | ResponseCollector | Document:
    """Make what collects the answer in the dialect of its request."""
    if facts.own_dialect == COUNT:
        return TokenCount(object="response.input_tokens")
    if facts.kind == "tokenize":
        return TokenCount()
    if facts.kind in WHOLE:
        return Document()
    if facts.own_dialect in RESPONSES:
        return ResponseCollector(facts, facts.own_dialect)
    return MessageCollector(facts) if facts.own_dialect == "anthropic.messages" else Accumulator(facts)
