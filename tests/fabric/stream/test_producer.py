"""The producer against the log, through every loss that a network and a failover cause."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.frames import (
    CHOICE_END_PREFIX,
    ChoiceEnd,
    End,
    Note,
    Usage,
    decode,
    encode,
    encode_text,
    is_end,
)
from stream_fabric.stream.log import (
    Append,
    AppendCode,
    AppendReply,
    Head,
    StreamState,
    Takeover,
)
from stream_fabric.stream.producer import UNKNOWN_MAX, Producer
from tests.fabric.stream.states import REPLICA, STREAM, TENANT, copied

PRODUCER_OPS = [
    *["push"] * 4, *["send"] * 3, *["reply"] * 3, "late", "lost", "keep", "failover", "wipe", "check", "usage",
    "finish", "cancel", "doorbell", "close", "input", "steer", "read",
]  # fmt: skip
OPS = st.lists(
    st.tuples(
        st.sampled_from(PRODUCER_OPS),
        st.integers(0, 2**16),
    ),
    max_size=120,
)


def head_of(state: StreamState | None) -> Head | None:
    if state is None:
        return None
    return Head(
        state.epoch, state.last, state.status, state.cancelled_at, "", 0, True, state.replica, len(state.inputs)
    )


class Line:
    """One producer and its log, with everything between them that a network and a failover do."""

    def __init__(self) -> None:
        self.epoch = Epoch(1, "aa")
        self.producer = Producer(STREAM, self.epoch)
        self.state: StreamState | None = self.made()
        self.kept: StreamState | None = self.made()
        self.requests: list[Append] = []
        self.replies: list[AppendReply] = []
        self.names: dict[tuple[int, int], bytes] = {}
        """(epoch, seq) → bytes, for ever."""
        self.failed_over = self.lost_replies = False
        self.doorbell: int | None = None
        self.steered = False
        self.stopped = False
        self.answered: list[str] = []

    def made(self) -> StreamState:
        return StreamState(self.epoch, TENANT, b"")

    def do(self, what: str, n: int) -> None:
        getattr(self, what)(n)
        self.check_log()

    def push(self, n: int) -> None:
        if not (self.producer.status or self.producer.stopped):
            self.producer.push(encode_text(0, f"{self.producer.last}-{n}"), n % 4, structural=n % 5 == 0)

    def usage(self, n: int) -> None:
        if not self.producer.status:
            self.producer.usage = Usage(n, n // 2, n // 3, 0, n % 7)

    def finish(self, n: int) -> None:
        if not (self.producer.status or self.producer.stopped) and n % 3 == 0:
            self.producer.finish(
                End(("completed", "failed", "incomplete", "cancelled")[n // 3 % 4], Usage(n, output=n))
            )

    def send(self, n: int) -> None:
        request = self.producer.append_to_send(1 + n % 6, 10 + n % 200)
        if request is not None:
            self.requests.append(request)
            self.late(0)

    def late(self, n: int) -> None:
        """A request arrives; now and then once more than it was sent."""
        if self.requests:
            request = self.requests[n % len(self.requests)]
            if self.state is None:
                self.replies = [AppendReply(AppendCode.NOSTREAM, 0)]
            else:
                reply = self.state.append(request, REPLICA)
                self.replies = [reply._replace(inputs=len(self.state.inputs))]

    def reply(self, n: int) -> None:
        if self.producer.in_flight and self.replies:
            self.outcome(self.producer.receive_reply(self.replies.pop()))
        self.settle()

    def lost(self, n: int) -> None:
        if self.producer.in_flight:
            self.lost_replies = True
            self.producer.receive_lost()
        self.settle()

    def settle(self) -> None:
        if not self.producer.in_flight:
            self.requests.clear()
            self.replies.clear()

    def outcome(self, outcome: str) -> None:
        if outcome == "create":
            if self.state is None:
                self.state = self.made()
        elif outcome == "inputs":
            self.read(0)
        elif outcome:
            self.stopped = True

    def close(self, n: int) -> None:
        """The engine ends its choice, and soon the stream."""
        if not (self.producer.status or self.producer.stopped or self.producer.is_closing):
            finish = ChoiceEnd(0, f"stop-{n}")
            self.producer.push(encode(finish), structural=True, closes=True)

    def input(self, n: int) -> None:
        if self.state is not None:
            self.state.input(f"i{n}", b"{}")

    def read(self, n: int) -> None:
        """The agent reads the inputs and answers the new ones, as ``inference.agent.steering`` does."""
        producer = self.producer
        if self.state is None or producer.stopped or producer.ended or (producer.is_closing and not producer.is_held):
            return
        names = list(self.state.inputs)
        fresh = [name for name in names if name not in self.answered]
        if producer.is_held and fresh:
            producer.take_back_end()
        producer.receive_inputs(len(names))
        for name in () if producer.status else fresh:
            producer.push_answer(encode(Note("input", body=msgspec.Raw(encode_text(0, name)[1:]))), structural=True)
            self.answered.append(name)

    def keep(self, n: int) -> None:
        """The replica has received everything so far."""
        self.kept = copied(self.state) if self.state else None

    def failover(self, n: int) -> None:
        """The replica takes over: the tail is gone, and what was on its way to the old server."""
        self.failed_over = True
        self.state = copied(self.kept) if self.kept else None
        self.lost(0)

    def wipe(self, n: int) -> None:
        if n % 4 == 0:
            self.failed_over = True
            self.state = self.kept = None
            self.lost(0)

    def check(self, n: int) -> None:
        self.outcome(self.producer.receive_head(head_of(self.state)))

    def steer(self, n: int) -> None:
        self.cancel(n, steers=True)

    def cancel(self, n: int, *, steers: bool = False) -> None:
        if self.state and n % 3 == 0:
            reply = self.state.cancel(steers=steers)
            if reply.result == "accepted":
                self.keep(0)  # a cancel that is lost whole is tried in the simulation
                self.doorbell, self.steered = self.state.cancelled_at, steers
                self.names = {k: v for k, v in self.names.items() if k[1] <= self.doorbell}

    def ring(self, n: int) -> None:
        if self.doorbell is not None:
            self.producer.receive_cancel(self.doorbell, steered=self.steered)

    def check_answers(self) -> None:
        """Each accepted input is answered once and in order, unless the stream was ended before its time."""
        assert self.state is not None
        log = [frame for entry in self.state.entries for frame in entry.frames.split(b"\n")]
        notes = [decode(frame) for frame in log if frame.startswith(b'{"k":"note"')]
        answered = [msgspec.json.decode(note.body) for note in notes if isinstance(note, Note) and note.body]
        assert len(answered) == len(set(answered)), "an input is answered twice"
        ends = [frame for frame in log if frame.startswith(CHOICE_END_PREFIX)]
        assert len(ends) <= 1, "nothing follows the end of an answer but the terminal"
        if self.producer.is_closing and not self.failed_over and not self.lost_replies:
            assert answered == list(self.state.inputs)

    def check_log(self) -> None:
        if self.state is None:
            return
        expected = 1
        for entry in self.state.entries:
            assert entry.first == expected, "invariant 2: the log is dense"
            lines = entry.frames.split(b"\n")
            assert len(lines) == entry.last - entry.first + 1
            for seq, line in enumerate(lines, entry.first):
                assert self.names.setdefault((entry.epoch, seq), line) == line, "invariant 2: one byte string for ever"
            expected = entry.last + 1
        assert self.state.last == expected - 1


@given(OPS)
@example([("push", 1), ("usage", 5), ("send", 0), ("usage", 9), ("cancel", 0), ("doorbell", 0), ("reply", 0)])
@example([("usage", 5), ("cancel", 0), ("doorbell", 0), ("wipe", 0), ("check", 0)])
@example([("push", 0), ("send", 0), ("reply", 0), ("finish", 9), ("send", 0), ("lost", 0), ("send", 0), ("wipe", 0)])
@example([("input", 1), ("close", 0), ("finish", 0), ("send", 0), ("reply", 0), ("send", 0), ("reply", 0)])
@example([("close", 0), ("send", 0), ("failover", 0), ("input", 1), ("send", 0), ("reply", 0), ("send", 0)])
@example(
    [("close", 0), ("send", 0), ("reply", 0), ("failover", 0), ("input", 1), ("check", 0), ("send", 0), ("reply", 0)]
)
def test_invariant_2_dense_log_and_one_byte_string_for_ever(ops: Sequence[tuple[str, int]]) -> None:
    line = Line()
    for what, n in ops:
        line.do("ring" if what == "doorbell" else what, n)
    # From here on nothing is lost: the log ends up with everything, and the producer knows
    if not (line.producer.status or line.producer.stopped):
        line.producer.finish(End("completed", line.producer.usage))
    if line.state and line.state.cancelled_at >= 0:
        line.ring(0)
    line.lost(0)
    line.check(0)
    for _ in range(300):
        if line.producer.ended or line.producer.stopped:
            break
        if not line.producer.status:  # the end was taken back, for an input
            line.producer.finish(End("completed", line.producer.usage))
        line.send(50)
        line.reply(0)
        line.check_log()
        assert line.producer.pending >= 0
    if line.producer.stopped:  # it was wiped before the producer ever heard that it existed
        assert line.state is None and not line.producer.created
        return
    line.check(0)
    while line.producer.pending:
        line.send(50)
        line.reply(0)
    assert line.producer.ended and not line.producer.pending
    line.check_answers()
    assert line.state is not None and line.state.status == line.producer.status
    log = [frame for entry in line.state.entries for frame in entry.frames.split(b"\n")]
    assert log == line.producer._frames
    assert is_end(log[-1]) and sum(map(is_end, log)) == 1
    structure = b"".join(b"%d %b\n" % item for item in line.producer.structure if item[0] < len(log))
    assert line.state.structure == structure


class TakenOver(Line):
    """The second producer of a stream, which goes on after the first one's three frames."""

    BASE = 3

    def __init__(self) -> None:
        super().__init__()
        self.producer = Producer(STREAM, Epoch(2, "bb"), self.BASE)
        self.producer.receive_prior_usage(Usage(7, output=2))

    def made(self) -> StreamState:
        state = super().made()
        frames = b"\n".join(encode_text(0, f"first-{seq}") for seq in range(1, self.BASE + 1))
        request = Append(STREAM, "1.aa", 1, self.BASE, frames, Usage(7, output=2))
        assert state.append(request, REPLICA).code is AppendCode.OK
        assert state.takeover(state.epoch, "bb") == Takeover(Epoch(2, "bb"), self.BASE)
        return state

    def outcome(self, outcome: str) -> None:
        assert outcome != "create", "it cannot make again what another said"
        super().outcome(outcome)


@given(OPS)
@example([("push", 1), ("send", 0), ("reply", 0), ("wipe", 0), ("check", 0)])
@example([("push", 1), ("cancel", 0), ("doorbell", 0), ("send", 0)])
def test_invariant_1_single_writer_and_2_dense_log_across_a_takeover(ops: Sequence[tuple[str, int]]) -> None:
    line = TakenOver()
    for what, n in ops:
        line.do("ring" if what == "doorbell" else what, n)
        if line.state is not None:  # the first producer's late words are never taken
            late = Append(STREAM, "1.aa", line.state.last + 1, line.state.last + 1, b'0"late"', Usage())
            assert line.state.append(late, REPLICA).code is AppendCode.FENCED
    if not (line.producer.status or line.producer.stopped):
        line.producer.finish(End("completed", line.producer.usage))
    if line.state and line.state.cancelled_at >= 0:
        line.ring(0)
    line.lost(0)
    line.check(0)
    for _ in range(300):
        if line.producer.ended or line.producer.stopped:
            break
        if not line.producer.status:  # the end was taken back, for an input
            line.producer.finish(End("completed", line.producer.usage))
        line.send(50)
        line.reply(0)
        line.check_log()
    line.check(0)
    while line.producer.pending:
        line.send(50)
        line.reply(0)
    if line.producer.stopped:
        assert line.state is None, "only a log that lost what came before it stops it"
        return
    assert line.producer.ended
    assert line.state is not None
    log = [frame for entry in line.state.entries for frame in entry.frames.split(b"\n")]
    assert log[line.BASE :] == line.producer._frames
    assert line.state.bases == [(2, line.BASE)]
    if line.state.status == "cancelled":
        billed = decode(log[-1])
        assert isinstance(billed, End)
        assert billed.usage is not None
        assert billed.usage.output >= 2, "what the first producer said is billed as well"


def test_a_failover_that_loses_what_came_before_a_takeover_stops_the_second_producer() -> None:
    line = TakenOver()
    line.push(0)
    line.send(0)
    assert line.producer.receive_reply(AppendReply(AppendCode.GAP, 1)) == "stop"
    for head in (None, Head(Epoch(2, "bb"), 1, "live", -1, "", 0, True, None)):
        other = TakenOver()
        assert other.producer.receive_head(head) == "stop"
        assert other.producer.append_to_send(8, 8192) is None


def test_a_second_producer_that_keeps_what_came_before_has_it_appended_again() -> None:
    lost = Head(Epoch(2, "bb"), 1, "live", -1, "", 0, True, None)
    for seen in (AppendReply(AppendCode.GAP, 1), AppendReply(AppendCode.NOSTREAM, 0), None, lost):
        line = TakenOver()
        producer = line.producer
        producer.keeps_earlier = True
        line.push(0)
        line.send(0)
        producer.receive_reply(AppendReply(AppendCode.OK, producer.base + 1))
        line.push(0)
        if isinstance(seen, AppendReply):
            line.send(0)
            assert producer.receive_reply(seen) == "create"
        else:
            assert producer.receive_head(seen) == "create"
        again = producer.append_to_send(8, 8192)
        assert again is not None and (again.first, again.last) == (producer.base + 1, producer.base + 2)


def test_invariant_5_exact_cancel_bills_what_the_log_billed() -> None:
    """The producer's copy of the terminal is the log's, whatever the engine reported since the append."""
    for reported_before in (True, False):
        line = Line()
        line.producer.usage = Usage(10, 4, 2, 0, 1) if reported_before else Usage()
        line.producer.push(b'0"a"', 1)
        line.send(0)
        line.producer.usage = Usage(99, 9, 9, 0, 9)
        assert line.state is not None
        line.state.cancel()
        line.producer.receive_cancel(1)
        assert line.state.entries[-1].frames == line.producer._frames[-1]
        assert decode(line.producer._frames[-1]) == End("cancelled", line.state.usage)


def test_invariant_10_a_cancel_that_a_failover_lost_is_billed_again_as_it_was() -> None:
    line = Line()
    line.producer.usage = Usage(10, 4, 2)
    line.producer.push(b'0"a"', 1)
    line.send(0)
    assert line.state is not None
    lost = copied(line.state)
    line.producer.push(b'{"k":"open","block":1,"choice":0,"kind":"text"}', structural=True)
    line.producer.usage = Usage(10, 4, 2, 50)
    line.state.cancel()
    line.producer.receive_cancel(1)
    assert line.producer.receive_head(head_of(lost)) == ""
    while (request := line.producer.append_to_send(8, 8192)) is not None:
        line.producer.receive_reply(lost.append(request, REPLICA))
    assert (lost.status, lost.cancelled_at) == ("cancelled", 1)
    assert [e.frames for e in lost.entries] == [e.frames for e in line.state.entries]
    assert (lost.usage, lost.structure) == (line.state.usage, line.state.structure)


def test_a_reply_after_the_doorbell_does_not_wake_the_producer() -> None:
    """Appended, cancelled and heard of by the doorbell, before the append's own reply is read."""
    producer = Producer(STREAM, Epoch(1, "aa"))
    for _ in range(3):
        producer.push(b'0"a"', 1)
    request = producer.append_to_send(8, 8192)
    assert request is not None
    producer.receive_cancel(3)
    assert producer.receive_reply(AppendReply(AppendCode.OK, 3)) == ""
    assert producer.ended and producer.pending == 0
    assert producer.append_to_send(8, 8192) is None


def test_invariant_10_redis_may_fail_over_and_gets_the_same_bytes() -> None:
    producer, state = Producer(STREAM, Epoch(1, "aa")), StreamState(Epoch(1, "aa"), TENANT, b"")
    for seq in range(1, 21):
        producer.push(encode_text(0, f"t{seq}"), 1)
        request = producer.append_to_send(8, 8192)
        assert request is not None
        producer.receive_reply(state.append(request, REPLICA))
        if seq == 12:
            kept = copied(state)
    whole = copied(state)
    # The tail is lost: found by the watchdog or by the next append
    assert producer.receive_head(head_of(kept)) == ""
    assert producer.pending == 8
    while (request := producer.append_to_send(8, 8192)) is not None:
        producer.receive_reply(kept.append(request, REPLICA))
    assert b"\n".join(e.frames for e in kept.entries) == b"\n".join(e.frames for e in whole.entries)
    # Everything is lost: the stream is made again
    producer.push(b'0"last"', 1)
    request = producer.append_to_send(8, 8192)
    assert request is not None
    assert producer.receive_reply(AppendReply(AppendCode.NOSTREAM, 0)) == "create"
    empty = StreamState(Epoch(1, "aa"), TENANT, b"")
    while (request := producer.append_to_send(8, 8192)) is not None:
        producer.receive_reply(empty.append(request, REPLICA))
    assert empty.last == 21
    assert b"\n".join(e.frames for e in empty.entries).startswith(b"\n".join(e.frames for e in whole.entries))


def test_a_stream_that_never_existed_is_dropped_and_not_made() -> None:
    producer = Producer(STREAM, Epoch(1, "aa"))
    producer.push(b'0"a"', 1)
    producer.append_to_send(8, 8192)
    for _ in range(UNKNOWN_MAX - 1):  # its creation may still be on its way
        assert producer.receive_reply(AppendReply(AppendCode.NOSTREAM, 0)) == ""
    assert producer.receive_reply(AppendReply(AppendCode.NOSTREAM, 0)) == "stop"
    assert producer.append_to_send(8, 8192) is None


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 400))
def test_batches_are_bounded(sizes: list[int], frames_max: int, bytes_max: int) -> None:
    producer, state = Producer(STREAM, Epoch(1, "aa")), StreamState(Epoch(1, "aa"), TENANT, b"")
    for size in sizes:
        producer.push(b'0"' + b"x" * size + b'"', 1)
    while (request := producer.append_to_send(frames_max, bytes_max)) is not None:
        lines = request.frames.split(b"\n")
        # Behind it sends more at once, but bounded still
        assert len(lines) == request.last - request.first + 1 <= frames_max * 8
        assert len(lines) == 1 or sum(map(len, lines)) <= bytes_max * 8
        assert producer.append_to_send(frames_max, bytes_max) is None
        assert producer.receive_reply(state.append(request, REPLICA)) == ""
    assert state.last == len(sizes)
