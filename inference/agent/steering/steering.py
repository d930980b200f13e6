"""Applies the inputs of running streams: the answer is cut at its last frame, and the engine is asked for the next one.

The note of an input is a frame of the stream, so the append that brings it to the log is the moment from which the
input counts. A producer that dies before leaves an input that waits; its successor reads the log and applies it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from inference.agent.continuation import CannotContinue
from inference.agent.running import CurrentAnswer, RunningStream
from inference.agent.steering.sink import SteeredSink
from inference.agent.steering.turns import Answer, Refusal, Turn, refusal, steered_request
from stream_fabric.errors import EngineFailed, FabricError
from stream_fabric.events import InputTimes
from stream_fabric.pool.records import EngineRequest
from stream_fabric.ports import Engine, FrameSink, StreamLog
from stream_fabric.stream.frames import InputNote, Note, StoredInput
from stream_fabric.stream.ids import StreamId

log = logging.getLogger(__name__)

_RETRY_S = 0.25
Submit = Callable[[RunningStream, EngineRequest, FrameSink], None]
"""Submits the request for a whole answer."""
Inputs = Sequence[StoredInput]
"""Inputs of a stream in the order of acceptance."""


class Steering:
    """Answers the inputs of this replica's streams.

    ``is_running``: whether a stream still runs here. ``on_input`` is called for each answered input.
    """

    def __init__(
        self,
        streams: StreamLog,
        engine: Engine,
        submit: Submit,
        is_running: Callable[[RunningStream], bool],
        tasks: asyncio.TaskGroup,
        on_input: Callable[[InputTimes], None],
    ) -> None:
        self._log = streams
        self._engine = engine
        self._submit = submit
        self._is_running = is_running
        self._tasks = tasks
        self._on_input = on_input
        self._reading: set[StreamId] = set()

    def read_soon(self, stream: RunningStream) -> None:
        """Read the stream's inputs and answer the new ones."""
        if stream.name not in self._reading:
            self._reading.add(stream.name)
            self._tasks.create_task(self._read(stream))

    async def _read(self, stream: RunningStream) -> None:
        try:
            while self._is_running(stream) and not stream.producer.stopped:
                told = stream.producer.told
                try:
                    inputs = await self._log.inputs(stream.name)
                except FabricError as error:
                    log.warning("read of a stream's inputs failed, retrying: stream=%s error=%s", stream.name, error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                if self._is_running(stream):
                    self.apply(stream, inputs, told)
                return
        except Exception as error:  # an input's content must not end the agent with all other streams
            log.exception("inputs of a stream failed: stream=%s", stream.name)
            self._keep_on(stream, stream.producer.told)
            stream.fail(EngineFailed("the agent failed at an input of this stream", detail=repr(error)))
            stream.abort(self._engine)
        finally:
            self._reading.discard(stream.name)

    def apply(self, stream: RunningStream, inputs: Inputs, told: int) -> None:
        """Answer the inputs that were not answered yet.

        ``told``: their number by the log, before they were read. Those that are not among ``inputs`` are lost.
        """
        producer, current = stream.producer, stream.answer
        if producer.stopped or producer.ended or stream.handed_over or stream.yielded:
            return  # whoever goes on reads the inputs
        if current.start < 0 and stream.work.parsed_epoch().n > 1:
            return  # the takeover still reads the log, and then the inputs; what comes after that the next append tells
        held = producer.is_held
        if producer.is_closing and not held:
            return  # if the end of the answer meets inputs that wait, the log says so
        fresh = [each for each in inputs if each.id not in current.seen]
        if not fresh or (held and producer.status not in ("", "completed")):
            self._keep_on(stream, told)
            return
        answer = Answer.of((*current.earlier, *producer.frames_after(max(current.start, producer.base))))
        why = refusal(stream.work.request, answer)
        if held and why:
            self._keep_on(stream, told)
        elif not held and (stream.closed or answer.ended):
            return  # it has failed, or ends for good
        elif why:
            producer.receive_inputs(len(inputs))
            self._refuse(stream, fresh, why)
        else:
            self._cut(stream, answer, inputs, fresh)

    @staticmethod
    def _keep_on(stream: RunningStream, told: int) -> None:
        """Go on with the answer, or with its end if the log has refused it."""
        held = stream.producer.is_held
        stream.producer.receive_inputs(told)
        if held:
            stream.append_end()

    def _refuse(self, stream: RunningStream, fresh: Inputs, why: Refusal) -> None:
        stream.answer = stream.answer._replace(seen=stream.answer.seen.union(each.id for each in fresh))
        for each in fresh:
            self._on_input(stream.timing.receive_input(each.at_us, "refused", why))
            stream.frame(_note(InputNote(each.id, "refused", why)))

    def _cut(self, stream: RunningStream, answer: Answer, inputs: Inputs, fresh: Inputs) -> None:
        """Stop the answer here, and ask for the next one."""
        stream.abort(self._engine)
        for layer in stream.layers:
            layer.drop()
        current, items = stream.answer, {each.id: each.item for each in inputs}
        names = [each.id for each in fresh]
        said = [answer.said] + [""] * (len(fresh) - 1)
        turns = (*current.turns, *map(Turn, said, names))
        notes = [_note(InputNote(name, "applied")) for name in names]
        used = stream.begin_answer(answer.open_blocks, notes, len(inputs))
        first_block = max(current.next_block, answer.next_block)
        stream.answer = CurrentAnswer(turns, current.seen.union(names), stream.producer.last, (), first_block)
        for each in fresh:
            self._on_input(stream.timing.receive_input(each.at_us, "applied"))
        try:
            request = steered_request(stream.work.request, turns, items)
        except CannotContinue as reason:  # Redis has lost an earlier input
            stream.fail(EngineFailed(f"the input cannot be applied: {reason}"))
            return
        self._submit(stream, request, SteeredSink(stream, first_block, used))


def _note(body: InputNote) -> Note:
    return Note("input", body=msgspec.Raw(msgspec.json.encode(body)))
