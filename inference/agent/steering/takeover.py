"""Continues a stream that another replica has begun, from its log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from inference.agent.budgets.allowance import BUDGET_REASON
from inference.agent.continuation import (
    CannotContinue,
    ContinuingSink,
    Part,
    PriorOutput,
    check_template,
    continuing_requests,
    end_at_limit,
    is_finished,
    prior_output,
)
from inference.agent.continued.repeated import PriorAnswer, RepeatingSink, read_prior
from inference.agent.handover import Handover
from inference.agent.running import CurrentAnswer, RunningStream
from inference.agent.steering.sink import SteeredSink
from inference.agent.steering.steering import Inputs, Steering
from inference.agent.steering.turns import Answer, Steered, refusal, split_turns, steered_request
from stream_fabric.errors import EngineFailed, FabricError, ReplicaLost
from stream_fabric.pool.records import EngineRequest
from stream_fabric.ports import Engine, FrameSink, StreamLog
from stream_fabric.stream.frames import Note, Usage
from stream_fabric.stream.producer import Outcome

log = logging.getLogger(__name__)

Submit = Callable[[RunningStream, EngineRequest, FrameSink, PriorOutput | None, Sequence[Part]], None]
"""Submits a request to the engine, or the parts of it. True: its output is a whole answer, not the rest of one."""


class Takeover:
    """Continues streams that other replicas have begun.

    ``set_deadline``: sets the timer of the request's deadline; False: it has passed. ``started_note``: the note that a
    replica puts before its output.
    """

    def __init__(
        self,
        streams: StreamLog,
        engine: Engine,
        handover: Handover,
        steering: Steering,
        submit: Submit,
        on_outcome: Callable[[RunningStream, Outcome], None],
        set_deadline: Callable[[RunningStream], bool],
        started_note: Callable[[RunningStream], Note],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._log = streams
        self._engine = engine
        self._handover = handover
        self._steering = steering
        self._submit = submit
        self._on_outcome = on_outcome
        self._set_deadline = set_deadline
        self._started_note = started_note
        self._tasks = tasks

    def begin(self, stream: RunningStream) -> None:
        """Continue the stream in the background; where that is impossible, end it."""
        self._tasks.create_task(self._take_over(stream))

    async def _take_over(self, stream: RunningStream) -> None:
        try:
            stream.prior = await self._handover.read_earlier_frames(stream)
            stream.producer.keeps_earlier = True
            earlier = split_turns(stream.prior)
            inputs = await self._log.inputs(stream.name)
            # No doorbell rings for a stream in which this replica has appended nothing
            (head,) = await self._log.heads(stream.partition, [stream.name], None)
            _, used = await self._log.settled(stream.name) or ("", Usage())
            stream.producer.receive_prior_usage(used)  # a cancel before its first append settles that
            if outcome := stream.producer.receive_head(head):
                self._on_outcome(stream, outcome)
            if stream.closed:  # cancelled meanwhile, or taken by another replica
                return
            if head is not None and head.status != "live":
                self._handover.let_ended_go(stream)
                return
            self._continue(stream, earlier, inputs)
        except CannotContinue as reason:
            error = ReplicaLost(f"the replica that produced this stream died, and {reason}; retry the request")
            await self._handover.end_unstarted(stream, error)
        except FabricError as error:
            self._handover.hand_over(stream, ReplicaLost(error.message))
        except Exception as error:  # a request's content must not end the agent with all other streams
            log.exception("takeover failed: stream=%s", stream.name)
            failed = EngineFailed("this replica failed to continue the stream", detail=repr(error))
            await self._handover.end_unstarted(stream, failed)

    def _continue(self, stream: RunningStream, earlier: Steered, inputs: Inputs) -> None:
        answer = Answer.of(earlier.rest)
        waits = any(each.id not in earlier.seen for each in inputs)
        cuts = waits and not answer.ended and refusal(stream.work.request, answer) is None
        before = self._before(stream.work.request, earlier, cuts=cuts)
        stream.answer = CurrentAnswer(
            earlier.turns, earlier.seen, stream.producer.base, tuple(earlier.rest), earlier.next_block
        )
        own = Usage(answer.prompt, answer.cached if earlier.turns or cuts else 0, output=answer.tokens)
        stream.take_over(earlier.used.plus(own), before.left_open, before.ended, earlier.used.output)
        if not self._set_deadline(stream):
            return
        if cuts:
            stream.frame(self._started_note(stream))
            self._steering.apply(stream, inputs, stream.producer.told)
        elif isinstance(before, PriorAnswer):
            self._repeat(stream, before)
        else:
            self._go_on(stream, earlier, inputs, before)
        if waits and not cuts and not stream.closed:  # refused now: at the answer's end it would get no note
            self._steering.apply(stream, inputs, stream.producer.told)

    def _before(self, request: EngineRequest, earlier: Steered, *, cuts: bool) -> PriorOutput | PriorAnswer:
        """Return the answer's output so far. Raises CannotContinue."""
        if cuts:  # an answer that an input cuts at once need not be one that could be continued
            return PriorOutput(())
        loaded = self._engine.loaded()
        if not earlier.turns:
            return read_prior(request, earlier.rest, loaded)
        before = prior_output(earlier.rest, request.choices)  # a repetition numbers its blocks from 0, like an answer
        if not before.empty and not all(is_finished(request, choice) for choice in before.choices):
            check_template(request, loaded)
        return before

    def _repeat(self, stream: RunningStream, before: PriorAnswer) -> None:
        if before.end is not None:
            stream.end("incomplete" if before.end.finish_reason == BUDGET_REASON else "completed")
            return
        stream.frame(self._started_note(stream))
        self._submit(stream, stream.work.request, RepeatingSink(stream, before, self._engine), None, ())

    def _go_on(self, stream: RunningStream, earlier: Steered, inputs: Inputs, before: PriorOutput) -> None:
        request: EngineRequest = stream.work.request
        sink: FrameSink = stream
        if earlier.turns:
            request = steered_request(request, earlier.turns, {each.id: each.item for each in inputs})
            sink = SteeredSink(stream, earlier.next_block if before.empty else 0, earlier.used)
        if before.empty:
            stream.frame(self._started_note(stream))
            self._submit(stream, request, sink, None, ())
        elif all(is_finished(request, choice) for choice in before.choices):
            end_at_limit(stream, request, before)
            stream.end("incomplete" if before.finish_reason == BUDGET_REASON else "completed")
        else:
            rest = continuing_requests(request, before)
            end_at_limit(stream, request, before)
            stream.frame(self._started_note(stream))
            self._submit(stream, request, ContinuingSink(sink, before), before, rest)
