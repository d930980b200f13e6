"""A ``FrameSink`` between the engine and its stream: output goes on once moderation has passed it.

Tokens are counted as they come: the time in which they wait says nothing about the engine.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from inference.agent.continuation import PriorOutput
from inference.agent.moderation.held_output import HeldOutput, Window
from inference.agent.running import RunningStream
from inference.agent.steering.layers import count_held
from stream_fabric.errors import ModerationUnavailable
from stream_fabric.limits import MODERATION_HELD_CHARS_MAX, MODERATION_LOCAL_CHARS
from stream_fabric.moderation.moderator import Moderator, unconfigured
from stream_fabric.ports import Engine, FrameSink
from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, ErrorInfo, Frame, Open, TerminalStatus, Usage

log = logging.getLogger(__name__)


class AnswerModeration:
    """Puts moderation between engine and streams whose plan asks for it. ``window_chars``: see the setting."""

    def __init__(
        self, moderator: Moderator | None, engine: Engine, tasks: asyncio.TaskGroup, window_chars: int
    ) -> None:
        self._moderator = moderator
        self._engine = engine
        self._tasks = tasks
        self._window_chars = window_chars

    def sink_for(self, stream: RunningStream, sink: FrameSink, before: PriorOutput | None) -> FrameSink | None:
        """Return where the engine's output goes. None: it cannot be checked, and the stream has failed.

        ``before``: output of earlier producers that it goes on from.
        """
        if not stream.work.moderated:
            return sink
        if self._moderator is None:
            stream.fail(unconfigured())
            return None
        return ModeratedSink(stream, sink, before, self._moderator, self._engine, self._tasks, self._window_chars)


class ModeratedSink:
    """Holds output back until it is checked. A flagged stream ends: its open choices with ``content_filter``."""

    def __init__(
        self,
        stream: RunningStream,
        sink: FrameSink,
        before: PriorOutput | None,
        moderator: Moderator,
        engine: Engine,
        tasks: asyncio.TaskGroup,
        window_chars: int,
    ) -> None:
        self._stream = stream
        self._sink = sink
        self._moderator = moderator
        self._engine = engine
        self._tasks = tasks
        self._held = HeldOutput(MODERATION_LOCAL_CHARS if moderator.is_local else window_chars)
        self._checking = False
        self._stopped = False
        self._ending: tuple[TerminalStatus, ErrorInfo | None, Usage | None] | None = None
        self._open_blocks: set[int] = set()
        self._ended_choices: set[int] = set()
        self._said = {} if before is None else {k: before.choices[k].text for k in before.open_blocks}
        """Text of each choice that earlier producers have begun, until it goes on: a phrase may begin in it."""

    def drop(self) -> None:
        """Take nothing more: an input has cut the answer. Text that waits was not said."""
        self._stop()

    # --- FrameSink -----------------------------------------------------------------------------------------

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        if not self._stopped:
            count_held(self._stream, tokens)
            self._held.add_text(block, text, partial(self._sink.text, block, text, tokens))
            self._advance()

    def frame(self, frame: Frame) -> None:
        if self._stopped:
            return
        call = partial(self._pass_on, frame)
        if isinstance(frame, Delta):
            count_held(self._stream, frame.tokens)
            self._held.add_text(frame.block, frame.text, call)
        else:
            if isinstance(frame, Open) and frame.kind == "text":
                self._held.go_on(frame.block, self._said.pop(frame.choice, ""))
            if isinstance(frame, Open) and frame.item is not None:
                self._held.add_text(frame.block, bytes(frame.item).decode("utf-8", "replace"), call)
            else:
                self._held.add(call)
            if isinstance(frame, Close):
                self._held.close(frame.block)
        self._advance()

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        self._sink.usage(prompt, cached, written, reasoning)

    def computed(self, queue_s: float, prefill_s: float) -> None:
        self._sink.computed(queue_s, prefill_s)

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        if not self._stopped and self._ending is None:
            self._ending = (status, error, usage)
            self._stream.timing.receive_reply_end()
            self._held.close()
            self._advance()

    # --- checks --------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Check what is due, and pass on what may go."""
        if self._stream.closed:
            self._stop()
            return
        if self._moderator.is_local:
            windows = self._held.windows()
            if windows:
                category = self._moderator.check_local([window.text for window in windows])
                if category is not None:
                    self._filter(category)
                    return
                self._held.pass_(windows)
        elif not self._checking and (windows := self._held.windows()):
            self._checking = True
            self._tasks.create_task(self._check(windows))
        for call in self._held.released():
            call()
        if self._held.empty and self._ending is not None and not self._stopped:
            self._stop()
            self._sink.end(*self._ending)
        elif self._held.chars > MODERATION_HELD_CHARS_MAX:
            self._fail(ModerationUnavailable("moderation is slower than the engine; retry in a moment"))

    async def _check(self, windows: list[Window]) -> None:
        try:
            category = await self._moderator.check([window.text for window in windows])
        except ModerationUnavailable as error:
            if not self._stopped:
                self._fail(error)
            return
        finally:
            self._checking = False
        if self._stopped:
            return
        if category is not None:
            self._filter(category)
            return
        self._held.pass_(windows)
        self._advance()

    def _pass_on(self, frame: Frame) -> None:
        match frame:
            case Open(block=block):
                self._open_blocks.add(block)
            case Close(block=block):
                self._open_blocks.discard(block)
            case ChoiceEnd(choice=choice):
                self._ended_choices.add(choice)
        self._sink.frame(frame)

    def _filter(self, category: str) -> None:
        """End the stream, because text that waits is flagged. Nothing of it goes on."""
        self._stop()
        if self._stream.closed:
            return
        log.info("answer filtered: stream=%s category=%s", self._stream.name, category)
        for block in sorted(self._open_blocks):
            self._sink.frame(Close(block))
        for choice in range(self._stream.work.request.choices):
            if choice not in self._ended_choices:
                self._sink.frame(ChoiceEnd(choice, "content_filter"))
        self._sink.end("incomplete")
        self._stream.abort(self._engine)

    def _fail(self, error: ModerationUnavailable) -> None:
        self._stop()
        if not self._stream.closed:
            self._stream.fail(error)
            self._stream.abort(self._engine)

    def _stop(self) -> None:
        self._stopped = True
        self._held.drop()
