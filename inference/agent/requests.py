"""Requests on this replica: from the inbox to the engine, and what becomes of their streams.

``Requests`` owns the running streams: the engine's calls arrive at it through ``RunningStream``, the log's replies
through ``Pump``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

import msgspec

from inference.agent.budgets.extender import BudgetExtender
from inference.agent.continuation import Part, PriorOutput
from inference.agent.continued.healed import ask_for_rest
from inference.agent.continued.parts import JoinedParts
from inference.agent.continued.prior import append_prior
from inference.agent.continued.repeated import can_repeat
from inference.agent.handover import Handover
from inference.agent.lease import Lease
from inference.agent.moderation.moderated_sink import AnswerModeration
from inference.agent.observe.attempt_timing import AttemptTiming, TokenTiming
from inference.agent.observe.load_tracker import LoadTracker
from inference.agent.pump import Pump
from inference.agent.replica import AgentPolicy, AgentPorts, ReplicaStatus
from inference.agent.running import RunningStream, Urgency
from inference.agent.steering.layers import is_droppable
from inference.agent.steering.steering import Steering
from inference.agent.steering.takeover import Takeover
from inference.agent.steering.turns import can_continue
from inference.agent.streams import Streams
from inference.agent.structured.checked_sink import ReplyChecks
from stream_fabric.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineLost,
    FabricError,
    ModelNotFound,
    ReplicaLost,
    from_info,
)
from stream_fabric.events import sampled
from stream_fabric.limits import ATTEMPTS_MAX
from stream_fabric.pool.records import Arrival, EngineRequest, Loaded
from stream_fabric.ports import Engine, FrameSink
from stream_fabric.process.backoff import Backoff, BackoffPolicy
from stream_fabric.stream.frames import ErrorInfo, Note
from stream_fabric.stream.ids import ReplicaId, StreamId, partition_of
from stream_fabric.stream.log import CreateCode, Head, Unwatched
from stream_fabric.stream.producer import Outcome

log = logging.getLogger(__name__)

INBOX_BLOCK_S = 1.0
_INBOX_RETRY = BackoffPolicy(0.05, 0.5)
_CREATE_RETRY_S = 0.5
_READERS_RETURN_S = 30.0
"""Minimum time for readers to come back whose gateway died, whatever the stream's own grace period."""
_TIMER_EARLY_S = 0.01
"""A timer may fire so much too early, and the log would find that the grace period still runs."""
_REPLICA_FAULTS = frozenset({EngineLost.code, "upstream_truncated"})
"""Error codes that are the replica's fault, not the request's: another replica may succeed."""
_NO_ROOM = (429, 503)
"""Statuses of an engine that has no room for a request now: its own queue is full, or it loads its model."""


class Requests:
    """The ``StreamOwner`` of all streams of this replica."""

    def __init__(
        self,
        policy: AgentPolicy,
        replica: ReplicaId,
        engine: Engine,
        ports: AgentPorts,
        status: ReplicaStatus,
        lease: Lease,
        load: LoadTracker,
        streams: Streams,
        handover: Handover,
        budgets: BudgetExtender,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._policy = policy
        self._replica = replica
        self._engine = engine
        self._log = ports.log
        self._inbox = ports.inbox
        self._inbox_retry = Backoff(_INBOX_RETRY, ports.random)
        self._clock = ports.clock
        self._status = status
        self._lease = lease
        self._load = load
        self._streams = streams
        self._handover = handover
        self._budgets = budgets
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._creating: set[RunningStream] = set()
        """Streams that are being created again."""
        self._moderation = AnswerModeration(ports.moderator, engine, tasks, policy.moderation_window_chars)
        self._replies = ReplyChecks(ports.checker, self._ask_engine, tasks)
        self._pump = Pump(ports.log, tasks, policy.flush_floor_s)
        self.steering = Steering(ports.log, engine, self._submit, streams.is_running, tasks, ports.on_input)
        self._takeover = Takeover(
            ports.log,
            engine,
            handover,
            self.steering,
            self._submit,
            self.on_outcome,
            self._set_deadline_timer,
            self._started_note,
            tasks,
        )

    async def run(self) -> None:
        """Take requests from the inbox until cancelled."""
        done: list[tuple[str, StreamId]] = []
        while True:
            try:
                arrivals, called = await self._inbox.read(INBOX_BLOCK_S, done)
                self._inbox_retry.reset()
                for arrival in arrivals:
                    self._start(arrival)
                if called:  # the reply to the report says how many batch streams have to yield
                    self._lease.report_soon()
                done = [(arrival.entry, arrival.stream) for arrival in arrivals]
            except FabricError as error:
                log.warning("read of the inbox failed, retrying: error=%s", error)
                await asyncio.sleep(self._inbox_retry.next_s())

    # --- start ---------------------------------------------------------------------------------------------

    def _start(self, arrival: Arrival) -> None:
        """Start an arrived request on the engine, unless its stream is already known in this or a newer epoch."""
        name, work = arrival.stream, arrival.work
        if work is None:
            log.error("request cannot be decoded; do gateways and agents run compatible versions? stream=%s", name)
            error = EngineFailed(f"replica {self._replica} cannot decode the request of a newer gateway; try again")
            self._tasks.create_task(self._handover.end_unread(name, error))
            return
        previous = self._streams.get(name)
        if previous is not None:
            if previous.work.epoch == work.epoch or previous.work.parsed_epoch().n > work.parsed_epoch().n:
                # The inbox entry was read twice, or the request was placed again after its end: replies were lost
                if name not in self._streams.running:
                    self._lease.report_end(name)
                return
            if name in self._streams.running:  # taken from this replica, and placed here again before we let go
                previous.producer.stopped = True
                self.stop(previous)
        one_in = self._policy.trace_tokens_one_in
        kind = TokenTiming if one_in and sampled(name, one_in) else AttemptTiming
        timing = kind(self._clock, arrival.waited_us, arrival.handed_us)
        partition = partition_of(name, self._log.partitions)
        stream = RunningStream(work, partition, self._pump.mark_dirty, self, self._loop.time(), timing)
        self._streams.add(stream)
        self._budgets.limit(stream)
        if work.parsed_epoch().n > 1:  # another replica has had it
            self._takeover.begin(stream)
        elif self._set_deadline_timer(stream):
            # The first append also checks that the stream exists and has not been cancelled
            stream.frame(self._started_note(stream))
            self._submit(stream, work.request, stream)

    def _started_note(self, stream: RunningStream) -> Note:
        body = {"replica": self._replica, "attempt": stream.work.attempt}
        return Note("started", body=msgspec.Raw(msgspec.json.encode(body)))

    def _submit(
        self,
        stream: RunningStream,
        request: EngineRequest,
        sink: FrameSink,
        before: PriorOutput | None = None,
        rest: Sequence[Part] = (),
    ) -> None:
        """Submit the request to the engine, or the ``rest`` of it where the output ``before`` is continued.

        A replica that has failed or sleeps hands the stream over. A continued reply is not checked against a schema:
        its beginning is missing.
        """
        if self._left_s(stream) <= 0:
            self._on_deadline(stream)  # its timer found an end that the log then refused
            return
        if self._status.failure is not None:
            self._handover.hand_over(stream, self._status.failure)
            return
        if self._status.asleep is not None:  # after a failover the fabric may place a request here nevertheless
            self._handover.hand_over(stream, EngineLost(f"the engine of replica {self._replica} sleeps"))
            return
        moderated = self._moderation.sink_for(stream, sink, before)
        if moderated is None:
            return
        checked = moderated if before is not None else self._replies.sink_for(stream, request, moderated)
        stream.layers = tuple(each for each in (checked, moderated, sink) if is_droppable(each))
        if len(rest) == 1 == request.choices:
            ask_for_rest(stream, rest[0], checked, self._engine, self._ask_engine)
            return
        if not rest:
            self._ask_engine(stream, request, checked)
            return
        stream.engine_names = [part.request.stream for part in rest]
        joined = JoinedParts(checked, rest, lambda: stream.abort(self._engine))
        for part, part_sink in zip(rest, joined.sinks, strict=True):
            ask_for_rest(stream, part, part_sink, self._engine, self._ask_engine)
            if joined.ended or stream.closed:  # refused
                stream.abort(self._engine)
                break

    def _ask_engine(self, stream: RunningStream, request: EngineRequest, sink: FrameSink) -> None:
        try:
            self._engine.submit(request, sink)
        except Exception as error:  # the engine is foreign code: one request must not end the agent with all others
            log.exception("submit to the engine failed: stream=%s", request.stream)
            stream.fail(EngineFailed("the engine failed on this request", detail=repr(error)))

    def _set_deadline_timer(self, stream: RunningStream) -> bool:
        """Set the timer of the request's deadline. False: the deadline has passed, and the stream has failed."""
        left_s = self._left_s(stream)
        if left_s <= 0:
            self._on_deadline(stream)
            return False
        if left_s < math.inf:
            stream.deadline = self._loop.call_later(left_s, self._on_deadline, stream)
        return True

    def _left_s(self, stream: RunningStream) -> float:
        """Seconds until the request's deadline; infinite without one."""
        deadline_ms = stream.work.request.deadline_unix_ms
        return deadline_ms / 1e3 - self._clock.now_us() / 1e6 if deadline_ms else math.inf

    def _on_deadline(self, stream: RunningStream) -> None:
        if not stream.closed and self._streams.is_running(stream):
            stream.fail(DeadlineExceeded("the request's deadline has passed"))
            stream.abort(self._engine)

    # --- the engine's calls --------------------------------------------------------------------------------

    def on_first_token(self, stream: RunningStream) -> None:
        self._load.receive_first_token(stream)
        self._lease.report_soon()

    def on_prompt(self, stream: RunningStream, tokens: int, cached: int) -> None:
        self._load.receive_prompt(stream, tokens, cached)

    def on_too_large(self, stream: RunningStream) -> None:
        stream.abort(self._engine)

    def on_budget_used(self, stream: RunningStream, question: tuple[int, int]) -> None:
        self._budgets.ask(stream, question)

    def on_budget_spent(self, stream: RunningStream) -> None:
        stream.abort(self._engine)

    def on_failure(self, stream: RunningStream, error: ErrorInfo) -> bool:
        if error.http_status >= 500 and error.code != ReplicaLost.code:  # that is a request it refuses to continue
            self._load.receive_failure(error.code)
        refused = stream.first_at is None and (error.http_status in _NO_ROOM or error.code == ModelNotFound.code)
        if not (refused or error.code in _REPLICA_FAULTS) or stream.work.attempts_counted >= ATTEMPTS_MAX:
            return False
        if stream.tokens and not _can_go_on(stream, self._engine.loaded()):
            return False  # the client hears now, not after another replica has read the log
        if refused:
            self._handover.hand_over(stream, from_info(error), comes_back=False)
        else:
            self._handover.hand_over(stream, EngineLost(error.message))
        return True

    # --- the log's replies ---------------------------------------------------------------------------------

    def on_outcome(self, stream: RunningStream, outcome: Outcome) -> None:
        match outcome:
            case "ended":
                self._streams.remove(stream, keep=True)
            case "stop":
                self.stop(stream)
            case "fenced":
                self._handover.release(stream)
            case "create" if stream not in self._creating:
                self._creating.add(stream)
                self._tasks.create_task(self._create_again(stream))
            case "inputs":
                self.steering.read_soon(stream)

    def on_unwatched(self, stream: RunningStream, why: Unwatched, for_s: float) -> None:
        grace_s = stream.work.unwatched_s
        if grace_s is None or stream.unwatched is not None or not self._streams.is_running(stream):
            return
        if why == "V":  # the gateway vanished without a word
            grace_s = max(grace_s, _READERS_RETURN_S)
        left_s = max(grace_s - for_s, 0.0) + _TIMER_EARLY_S
        stream.unwatched = self._loop.call_later(left_s, self._on_grace_over, stream, grace_s)

    def receive_watched(self, stream: RunningStream, head: Head) -> None:
        """Take from the stream's head whether somebody watches it."""
        if head.status == "live" and head.unwatched:
            self.on_unwatched(stream, head.unwatched, head.unwatched_ms / 1000)

    def _on_grace_over(self, stream: RunningStream, grace_s: float) -> None:
        stream.unwatched = None
        if self._streams.is_running(stream):
            self._tasks.create_task(self._cancel_unwatched(stream, grace_s))

    async def _cancel_unwatched(self, stream: RunningStream, grace_s: float) -> None:
        """Cancel the stream, if nobody has watched it for so long; the doorbell or an append brings the answer."""
        try:
            reply = await self._log.cancel(stream.name, stream.work.tenant, int(grace_s * 1000))
            if reply.result == "watched":  # a reader came back, and may have left again before this timer ended
                (head,) = await self._log.heads(stream.partition, [stream.name], None)
                if head is not None:
                    self.receive_watched(stream, head)
        except FabricError as error:
            log.warning("cancel of an unwatched stream failed, retrying: stream=%s error=%s", stream.name, error)

    def append_again(self, stream: RunningStream) -> None:
        """Append again the frames that the log has lost."""
        self._pump.mark_dirty(stream, Urgency.HIGH)

    def stop(self, stream: RunningStream) -> None:
        """Stop a stream that another process has ended, or that cannot go on here."""
        stream.closed = True
        if self._streams.is_running(stream):  # else it has come back, and the engine works on it again
            stream.abort(self._engine)
        if stream.work.base and not stream.producer.ended:
            # It may still be ours: the log has lost the part before our epoch, which we cannot produce again
            self._tasks.create_task(self._handover.fence(stream))
        self._streams.remove(stream, keep=stream.producer.ended)

    def stop_retries(self) -> None:
        """Give up frames that the log does not take, because this process ends.

        Another process recovers the streams that still run here. It continues or ends them from their logs.
        """
        self._pump.stop_retries()
        for stream in self._streams.running.values():
            stream.producer.stopped = stream.closed = True  # closed: it asks for no budget, and takes no output

    async def _create_again(self, stream: RunningStream) -> None:
        """Create a stream that the log has lost, in the same epoch, and append every frame of all producers again."""
        work = stream.work
        try:
            code = await self._log.create(
                stream.name,
                work.parsed_epoch(),
                work.tenant,
                work.facts,
                None,
                work.request.model,
                reserved=work.reserved,
                retention_s=work.retention_s,
            )
            if code in (CreateCode.TAKEN, CreateCode.CANCELLED):  # cancelled while it was lost, or taken by another
                stream.producer.stopped = True
                self.stop(stream)
                return
            if stream.prior:
                await append_prior(self._log, stream)
        except FabricError as error:
            log.warning("creating a lost stream again failed, retrying: stream=%s error=%s", stream.name, error)
            await asyncio.sleep(_CREATE_RETRY_S)
        finally:
            self._creating.discard(stream)
        self._pump.mark_dirty(stream, Urgency.HIGH)


def _can_go_on(stream: RunningStream, loaded: Loaded) -> bool:
    """Whether another replica with the same engine can continue or repeat the stream."""
    request = stream.work.request
    return can_continue(request, stream.structure, loaded) or can_repeat(request, stream.tokens)
