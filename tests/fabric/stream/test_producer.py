"""The pure kernel under Hypothesis: cursors, frames, the producer against the log, the reader against everything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stream_fabric.cursor import BEGINNING, Cursor, Epoch
from stream_fabric.errors import CursorGone, CursorInvalid
from stream_fabric.frames import (
    Annotation,
    ChoiceEnd,
    Close,
    Delta,
    End,
    ErrorInfo,
    Frame,
    Note,
    Open,
    Usage,
    coalesce,
    decode,
    encode,
    encode_text,
    is_end,
    is_text,
    text_parts,
)
from stream_fabric.ids import (
    ReplicaId,
    StreamId,
    TenantId,
    derived_id,
    is_stream_id,
    new_stream_id,
    partition_of,
)
from stream_fabric.log import Append, AppendCode, AppendReply, Entry, Head, Page, StreamState, Takeover, cancelled_end
from stream_fabric.producer import UNKNOWN_MAX, Producer
from stream_fabric.reader import Gap, Need, Reader, Reset, Run, Step, check_cursor
from stream_fabric.redis.client import Address, RedisUrl, slot_of
from tests.support.redis import RedisServer

STREAM = StreamId("resp_" + "0" * 32)
TENANT, REPLICA = TenantId("t"), ReplicaId("r")
LOST = ErrorInfo("replica_lost", "gone")


# --- ids and cursors ---------------------------------------------------------------------------------------


@given(st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10))
def test_stream_ids_are_uuid7_that_sort_by_time(unix_ms: int, entropy: bytes) -> None:
    stream = new_stream_id(unix_ms, entropy)
    assert is_stream_id(stream)
    assert re.fullmatch(r"resp_[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15}", stream)
    assert new_stream_id((unix_ms + 1) % 2**48, entropy) > stream or unix_ms == 2**48 - 1
    assert 0 <= partition_of(stream, 16) < 16
    assert derived_id("msg_", stream, 10) == f"msg_{stream[5:]}a"


def test_stream_ids_refuse_junk() -> None:
    with pytest.raises(ValueError, match="10 bytes"):
        new_stream_id(0, b"short")
    for junk in ("", "resp_", "resp_" + "g" * 32, "resp_" + "0" * 33, "resp_" + "0" * 32 + "\n", "msg_" + "0" * 32):
        assert not is_stream_id(junk)


@given(st.integers(0, 10**15 - 1), st.integers(0, 10**15 - 1))
def test_cursors_round_trip(epoch: int, seq: int) -> None:
    cursor = Cursor(epoch, seq)
    assert Cursor.parse(str(cursor)) == cursor


@given(st.one_of(st.text(max_size=40), st.from_regex(r"[-+ _0-9a-fx.٣]{0,8}-[-+ _0-9a-fx.٣]{0,40}")))
@example("1-\uff12")
@example("01-1")
@example("1-1\n")
@example("1-1-1")
@example("1-" + "9" * 16)
def test_cursors_refuse_every_other_spelling(text: str) -> None:
    try:
        cursor = Cursor.parse(text)
    except CursorInvalid as error:
        assert "cursor" in error.message
    else:
        assert str(cursor) == text


@given(st.integers(1, 9999), st.text("0123456789abcdef", max_size=8))
def test_epochs_round_trip(n: int, nonce: str) -> None:
    assert Epoch.parse(str(Epoch(n, nonce))) == Epoch(n, nonce)


# --- frames ------------------------------------------------------------------------------------------------

RAW = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
).map(lambda value: msgspec.Raw(msgspec.json.encode(value)))
BLOCKS = st.integers(0, 10**6)
COUNTS = st.integers(0, 10**9)
USAGES = st.builds(Usage, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
FRAMES = st.one_of(
    st.builds(Delta, BLOCKS, TEXT, st.integers(0, 99), st.none() | RAW),
    st.builds(Open, BLOCKS, BLOCKS, st.sampled_from(["text", "reasoning", "tool", "item"]), id=st.none() | TEXT),
    st.builds(Close, BLOCKS, st.none() | TEXT),
    st.builds(Annotation, BLOCKS, RAW),
    st.builds(ChoiceEnd, BLOCKS, TEXT, st.none() | RAW),
    st.builds(
        Note, st.sampled_from(["queued", "started", "prompt", "input"]), st.none() | COUNTS, body=st.none() | RAW
    ),
    st.builds(
        End,
        st.sampled_from(["completed", "cancelled", "failed", "incomplete"]),
        st.none() | USAGES,
        st.none() | st.builds(ErrorInfo, TEXT, TEXT),
    ),
)


def plain(frame: Frame) -> object:
    return msgspec.json.decode(msgspec.json.encode(frame))


@given(FRAMES)
def test_frames_round_trip_in_one_line_without_the_fabrics_separators(frame: Frame) -> None:
    line = encode(frame)
    assert not set(b"\n\r\x1e\x1f") & set(line)
    assert plain(decode(line)) == plain(frame)
    if not isinstance(frame, Delta) or frame.logprobs is None:
        assert encode(decode(line)) == line
    assert is_end(line) == isinstance(frame, End)


@given(st.text("\ud800\udfffa\n\x1f", max_size=8))
def test_text_with_lone_surrogates_still_encodes(text: str) -> None:
    frame = decode(encode_text(0, text))
    assert isinstance(frame, Delta)
    assert frame.text == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@pytest.mark.parametrize("space", ["\n", "\r", "\r\n", "\n\n\t"])
def test_raw_json_from_outside_becomes_one_line(space: str) -> None:
    body = msgspec.Raw(f'{{{space}"a":{space}[1,{space}"x y"]}}'.encode())
    assert encode(Annotation(0, body)) == b'{"k":"annotation","block":0,"body":{"a":[1,"x y"]}}'


@given(st.binary(min_size=1, max_size=40))
def test_decode_refuses_junk_with_its_own_error(line: bytes) -> None:
    try:
        frame = decode(line)
    except (msgspec.MsgspecError, ValueError):
        return
    assert isinstance(frame, Frame)


@given(st.lists(st.one_of(st.tuples(st.integers(0, 2), TEXT, st.integers(0, 3)), FRAMES), max_size=30))
def test_coalesce_keeps_text_tokens_and_order(items: list[tuple[int, str, int] | Frame]) -> None:
    lines = [encode_text(*item) if isinstance(item, tuple) else encode(item) for item in items]

    def told(some: list[bytes]) -> list[object]:
        out: list[object] = []
        for line in some:
            if not is_text(line):
                out.append(line)
                continue
            block, tokens, quoted = text_parts(line)
            text = msgspec.json.decode(quoted, type=str)
            if out and isinstance(out[-1], tuple) and out[-1][0] == block:
                block, tokens, text = block, out[-1][1] + tokens, out[-1][2] + text
                out.pop()
            out.append((block, tokens, text))
        return out

    joined = coalesce(lines)
    assert told(joined) == told(lines)
    assert len(joined) == len(told(lines))
    assert coalesce(joined) == joined


# --- the producer against the log --------------------------------------------------------------------------

PRODUCER_OPS = [
    *["push"] * 4, *["send"] * 3, *["reply"] * 3, "late", "lost", "keep", "failover", "wipe", "check", "usage",
    "finish", "cancel", "doorbell",
]  # fmt: skip
OPS = st.lists(
    st.tuples(
        st.sampled_from(PRODUCER_OPS),
        st.integers(0, 2**16),
    ),
    max_size=120,
)


def copied(state: StreamState) -> StreamState:
    return replace(state, watchers=list(state.watchers), bases=list(state.bases), entries=list(state.entries))


def head_of(state: StreamState | None) -> Head | None:
    if state is None:
        return None
    return Head(state.epoch, state.last, state.status, state.cancelled_at, "", 0, True, state.replica)


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
        self.failed_over = False
        self.doorbell: int | None = None
        self.stopped = False

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
                self.replies = [self.state.append(request, REPLICA)]

    def reply(self, n: int) -> None:
        if self.producer.in_flight and self.replies:
            self.outcome(self.producer.receive_reply(self.replies.pop()))
        self.settle()

    def lost(self, n: int) -> None:
        if self.producer.in_flight:
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
        elif outcome:
            self.stopped = True

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

    def cancel(self, n: int) -> None:
        if self.state and n % 3 == 0:
            reply = self.state.cancel()
            if reply.result == "accepted":
                self.keep(0)  # a cancel that is lost whole is tried in the simulation
                self.doorbell = self.state.cancelled_at
                self.names = {k: v for k, v in self.names.items() if k[1] <= self.doorbell}

    def ring(self, n: int) -> None:
        if self.doorbell is not None:
            self.producer.receive_cancel(self.doorbell)

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
def test_invariant_2_dense_log_and_one_byte_string_for_ever(ops: Sequence[tuple[str, int]]) -> None:
    line = Line()
    for what, n in ops:
        line.do("ring" if what == "doorbell" else what, n)
    # From here on nothing is lost: the log ends up with everything, and the producer knows
    if not (line.producer.status or line.producer.stopped):
        line.producer.finish(End("completed", line.producer.usage))
    if line.state and line.state.status == "cancelled":
        line.ring(0)
    line.lost(0)
    line.check(0)
    for _ in range(300):
        if line.producer.ended or line.producer.stopped:
            break
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
        self.producer.receive_used(Usage(7, output=2))

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
    if line.state and line.state.status == "cancelled":
        line.ring(0)
    line.lost(0)
    line.check(0)
    for _ in range(300):
        if line.producer.ended or line.producer.stopped:
            break
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


# --- the reader against everything -------------------------------------------------------------------------

READER_OPS_WEIGHED = [
    *["append"] * 4, *["deliver"] * 4, *["page"] * 2, *["answer"] * 2, "dup", "drop", "recheck", "pause", "resume",
    "keep", "failover", "wipe", "takeover", "fence", "cancel", "finish",
]  # fmt: skip
READER_OPS = st.lists(
    st.tuples(
        st.sampled_from(READER_OPS_WEIGHED),
        st.integers(0, 2**16),
    ),
    max_size=150,
)


def steps(text: str) -> list[tuple[str, int]]:
    return [(word.split()[0], int(word.split()[1])) for word in text.split(",")]


class Following:
    """One stream with its publishes and pages on their way, and a client that follows it."""

    def __init__(self) -> None:
        self.state: StreamState | None = StreamState(Epoch(1, "aa"), TENANT, b"")
        self.kept: StreamState | None = copied(self.state)
        self.reader = Reader(BEGINNING)
        self.net: list[tuple[int, int, int, bytes]] = []
        self.pages: list[Page] = []
        self.frames: dict[tuple[int, int], bytes] = {}
        """What each producer has to say, once said."""
        self.shown: list[tuple[int, bytes]] = []
        self.told: list[Step] = []
        self.ended = False

    # The stream

    def _frame(self, epoch: int, seq: int) -> bytes:
        return self.frames.setdefault((epoch, seq), encode_text(0, f"{epoch}/{seq}"))

    def append(self, n: int) -> None:
        state = self.state
        if state is None:  # its producer makes it again
            self.state = state = StreamState(Epoch(1, "aa"), TENANT, b"")
        if state.status == "live":
            first, last = state.last + 1, state.last + 1 + n % 5
            lines = []
            for seq in range(first, last + 1):
                lines.append(self._frame(state.epoch.n, seq))
                if is_end(lines[-1]):
                    break
            self._append(first, lines)

    def _append(self, first: int, lines: list[bytes]) -> None:
        assert self.state is not None
        last, frames = first + len(lines) - 1, b"\n".join(lines)
        status = decode(lines[-1]).status if is_end(lines[-1]) else ""  # type: ignore[union-attr]
        request = Append(STREAM, str(self.state.epoch), first, last, frames, Usage(), b"", status)
        assert self.state.append(request, REPLICA).code is AppendCode.OK
        self.net.append((self.state.epoch.n, first, last, frames))

    def finish(self, n: int) -> None:
        state = self.state
        if state and state.status == "live" and n % 4 == 0:
            seq = state.last + 1
            while (state.epoch.n, seq) in self.frames:
                seq += 1
            if not self.frames.get((state.epoch.n, seq - 1), b"").startswith(b"{"):
                self.frames[state.epoch.n, seq] = encode(End("completed", Usage()))

    def takeover(self, n: int) -> None:
        if self.state and self.state.status == "live" and n % 3 == 0:
            epoch = Epoch(self.state.epoch.n + 1, "t")
            self.state.bases.append((epoch.n, self.state.last))
            self.state.epoch = epoch
            self.kept = copied(self.state)

    def fence(self, n: int) -> None:
        if self.state and n % 5 == 0 and self.state.fence(None, "f", LOST):
            self._published_end()

    def cancel(self, n: int) -> None:
        if self.state and n % 5 == 0 and self.state.cancel().result == "accepted":
            self._published_end()

    def _published_end(self) -> None:
        assert self.state is not None
        entry = self.state.entries[-1]
        self.net.append((entry.epoch, entry.first, entry.last, entry.frames))
        self.kept = copied(self.state)

    def keep(self, n: int) -> None:
        self.kept = copied(self.state) if self.state else None

    def failover(self, n: int) -> None:
        self.state = copied(self.kept) if self.kept else None

    def wipe(self, n: int) -> None:
        if self.state and self.state.epoch.n == 1 and self.state.status == "live" and n % 4 == 0:
            self.state = self.kept = None

    # The network and the client

    def deliver(self, n: int) -> None:
        if self.net:
            self.take(self.reader.receive_live(*self.net.pop(n % min(len(self.net), 3))))

    def dup(self, n: int) -> None:
        if self.net:
            self.take(self.reader.receive_live(*self.net[n % len(self.net)]))

    def drop(self, n: int) -> None:
        if self.net:
            self.net.pop(n % len(self.net))

    def page(self, n: int) -> None:
        if self.reader.need is Need.PAGE and not self.pages and self.state:
            self.pages.append(self.state.page(self.reader.cursor, 1 + n % 6))

    def answer(self, n: int) -> None:
        if self.pages:
            page = self.pages.pop()
            if self.reader.need is Need.PAGE:
                self.take(self.reader.receive_page(page))

    def recheck(self, n: int) -> None:
        self.reader.recheck()

    def pause(self, n: int) -> None:
        if not self.pages:
            self.reader.pause()

    def resume(self, n: int) -> None:
        self.reader.resume()

    def take(self, steps: list[Step]) -> None:
        for step in steps:
            assert not self.ended, "nothing follows the terminal"
            match step:
                case Run(epoch, first, lines):
                    assert first == len(self.shown) + 1, "invariant 3: cursor+1 and nothing else"
                    assert lines
                    self.shown += [(epoch, line) for line in lines]
                    self.ended = is_end(lines[-1])
                    assert not any(map(is_end, lines[:-1]))
                case Reset(_, to):
                    assert to < len(self.shown)
                    self.told.append(step)
                    del self.shown[to:]
                case Gap():
                    raise AssertionError(f"invariant 4: the log holds everything, yet {step}")
        assert self.reader.seq == len(self.shown)
        assert (self.reader.need is Need.NOTHING) == self.ended


@given(READER_OPS)
@example(steps("append 4, page 5, answer 0, takeover 0, append 2, drop 0, append 2, drop 0, deliver 0"))
@example(steps("append 1, page 5, answer 0, keep 0, append 4, deliver 0, deliver 0, failover 0, cancel 0, deliver 0"))
def test_invariant_3_delivery_filter_and_4_no_silent_loss(ops: Sequence[tuple[str, int]]) -> None:
    f = Following()
    for what, n in ops:
        getattr(f, what)(n)
    # The faults are over, and the watchdog looks
    if f.state is None:
        f.append(0)
    assert f.state is not None
    f.finish(0)
    for _ in range(200):
        if f.state.status != "live":
            break
        f.append(4)
    assert f.state.status != "live"
    f.pages.clear()
    f.resume(0)
    for _ in range(400):
        if f.ended:
            break
        f.recheck(0)
        f.page(5)
        f.answer(0)
    assert f.ended, "invariant 4: the terminal arrives"
    log = [(e.epoch, line) for e in f.state.entries for line in e.frames.split(b"\n")]
    assert [line for _, line in f.shown] == [line for _, line in log], "invariant 4: whole, once, in order"
    assert [epoch for epoch, _ in f.shown] == [epoch for epoch, _ in log]


@given(READER_OPS)
def test_invariant_8_slow_readers_cost_constant_memory(ops: Sequence[tuple[str, int]]) -> None:
    """However much is published to a reader that does not drain, it holds its cursor and nothing more."""
    f = Following()
    f.append(4)
    f.page(5)
    f.answer(0)
    f.reader.pause()
    cursor = f.reader.cursor
    for what, n in ops:
        if what not in ("resume", "pause", "page", "answer", "recheck"):
            getattr(f, what)(n)
        assert (f.reader.cursor, f.reader.need) == (cursor, Need.DRAIN)
    held = [getattr(f.reader, name) for name in Reader.__slots__]
    assert all(isinstance(value, int | str | Need) for value in held), "no container in the reader"


def entry_page(state: StreamState, after: Cursor) -> Page:
    return state.page(after, 64)


def test_a_log_that_was_evicted_is_told_as_a_gap() -> None:
    f = Following()
    f.append(4)
    assert f.state is not None
    f.state.entries.clear()
    reader = Reader(Cursor(1, 2))
    assert reader.receive_page(entry_page(f.state, reader.cursor)) == [Gap(3, 5)]
    f.append(0)
    assert reader.receive_page(entry_page(f.state, reader.cursor)) == [Run(1, 6, [f.frames[1, 6]])]
    reader = Reader(Cursor(1, 0))
    assert reader.receive_page(entry_page(f.state, reader.cursor))[0] == Gap(1, 5)


def test_a_cancel_below_what_was_shown_sets_the_reader_back() -> None:
    """A failover lost frames that a reader has; a cancel came before the producer sent them again."""
    f = Following()
    f.append(1)
    f.page(9)
    f.answer(0)
    f.keep(0)
    f.append(2)
    f.deliver(1)
    assert f.reader.seq == 5
    f.failover(0)
    f.cancel(0)
    f.deliver(1)  # the terminal, 3
    f.page(9)
    f.answer(0)
    assert f.told == [Reset(1, 2)]
    f.page(9)
    f.answer(0)
    assert f.ended and f.shown[-1] == (1, cancelled_end(Usage()))


def test_a_takeover_that_a_failover_lost_is_told_from_the_one_that_got_its_number() -> None:
    def state(nonce: str, base: int, last: int) -> StreamState:
        made = StreamState(Epoch(2, nonce), TENANT, b"", bases=[(2, base)])
        made.entries = [Entry(1 if seq <= base else 2, seq, seq, b'0"%d"' % seq) for seq in range(1, last + 1)]
        made.last = last
        return made

    for known in (Reader(Cursor(2, 2), "lost"), Reader(Cursor(1, 0))):
        known.receive_page(entry_page(state("lost", 2, 5), known.cursor))
        assert known.cursor == Cursor(2, 5)
        known.recheck()
        after = state("kept", 3, 6)
        assert known.receive_page(entry_page(after, known.cursor)) == [Reset(2, 3)]
        lines = [b'0"4"', b'0"5"', b'0"6"']
        assert [line for step in known.receive_page(entry_page(after, known.cursor)) for line in step.lines] == lines
        known.recheck()
        assert known.receive_page(entry_page(after, known.cursor)) == []
        assert known.need is Need.LIVE


def test_a_takeover_that_a_failover_lost_for_good_is_told() -> None:
    """The first producer was not dead, and goes on in its own epoch: what the second one said is void."""
    first = StreamState(Epoch(1, "aa"), TENANT, b"")
    second = StreamState(Epoch(2, "bb"), TENANT, b"", bases=[(2, 3)])
    for state, last in ((first, 4), (second, 6)):
        state.entries = [
            Entry(2 if state is second and seq > 3 else 1, seq, seq, b'0"%d"' % seq) for seq in range(1, last + 1)
        ]
        state.last = last
    whole, resumed = Reader(Cursor(1, 0)), Reader(Cursor(2, 5))
    for reader, kept in ((whole, 3), (resumed, 0)):  # who began later does not know what was before
        reader.receive_page(entry_page(second, reader.cursor))
        assert (reader.cursor, reader.need) == (Cursor(2, 6), Need.LIVE)
        reader.recheck()
        assert reader.receive_page(entry_page(first, reader.cursor)) == [Reset(1, kept)]
        (*_, run) = reader.receive_page(entry_page(first, reader.cursor))
        assert isinstance(run, Run) and run.lines == [b'0"4"']
        assert (reader.cursor, reader.need) == (Cursor(1, 4), Need.LIVE)


def test_a_reader_that_begins_after_the_terminal_is_done() -> None:
    f = Following()
    f.finish(0)
    f.append(0)
    assert f.state is not None and f.state.status == "completed"
    reader = Reader(Cursor(1, f.state.last))
    assert reader.receive_page(entry_page(f.state, reader.cursor)) == []
    assert reader.need is Need.NOTHING


def test_check_cursor() -> None:
    epoch, bases = Epoch(3, "x"), ((2, 40), (3, 60))
    for good in (Cursor(1, 0), Cursor(1, 40), Cursor(2, 60), Cursor(3, 61), Cursor(3, 70)):
        check_cursor(good, epoch, 70, bases)
    for ahead in (Cursor(3, 71), Cursor(4, 1), Cursor(0, 0)):
        with pytest.raises(CursorInvalid):
            check_cursor(ahead, epoch, 70, bases)
    with pytest.raises(CursorGone, match="1-40"):
        check_cursor(Cursor(1, 41), epoch, 70, bases)
    with pytest.raises(CursorGone, match="2-60"):
        check_cursor(Cursor(2, 61), epoch, 70, bases)


# --- where Redis is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", RedisUrl("single", (Address("h", 6379),), None, None, 0, "mymaster", False)),
        ("redis://h:1/3", RedisUrl("single", (Address("h", 1),), None, None, 3, "3", False)),
        ("rediss://u:p%40@h:1", RedisUrl("single", (Address("h", 1),), "u", "p@", 0, "mymaster", True)),
        ("redis://:secret@h", RedisUrl("single", (Address("h", 6379),), None, "secret", 0, "mymaster", False)),
        ("redis://[::1]:7", RedisUrl("single", (Address("::1", 7),), None, None, 0, "mymaster", False)),
        (
            "redis+sentinel://a,b:2/main",
            RedisUrl("sentinel", (Address("a", 26379), Address("b", 2)), None, None, 0, "main", False),
        ),
        (
            "rediss+cluster://u:p@a:1,b",
            RedisUrl("cluster", (Address("a", 1), Address("b", 6379)), "u", "p", 0, "mymaster", True),
        ),
    ],
)
def test_redis_urls(url: str, expected: RedisUrl) -> None:
    parsed = RedisUrl.parse(url)
    if expected.mode == "single":
        expected = replace(expected, master=parsed.master)
    assert parsed == expected


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h", "redis\\+sentinel://"),
        ("redis://", "host:port"),
        ("redis://h:port", "host:port"),
        ("redis+cluster://a,,b", "host:port"),
        ("redis://h/name", "database number"),
    ],
)
def test_redis_urls_refuse_junk_and_say_what_is_allowed(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RedisUrl.parse(url)


def test_slots_are_the_known_ones() -> None:
    assert slot_of("123456789") == 0x31C3
    assert slot_of("foo") == 12182


def test_slots_are_those_of_the_server() -> None:
    with RedisServer(**{"cluster-enabled": "yes"}) as server:
        for tag in ("p0", "p15", "pool:meta-llama/Llama-3", "pools", "idem:0a", "é"):
            assert server("CLUSTER", "KEYSLOT", f"sg:{{{tag}}}:x") == slot_of(tag)
