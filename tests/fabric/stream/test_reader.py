"""The reader against publishes, pages and failovers of its stream."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stream_fabric.errors import CursorGone, CursorInvalid
from stream_fabric.stream.cursor import BEGINNING, Cursor, Epoch
from stream_fabric.stream.frames import (
    End,
    Usage,
    decode,
    encode,
    encode_text,
    is_end,
    is_text,
)
from stream_fabric.stream.log import (
    Append,
    AppendCode,
    Entry,
    Page,
    StreamState,
    cancelled_end,
    cut_frames,
)
from stream_fabric.stream.reader import Gap, Need, Reader, Reset, Run, Step, check_cursor
from tests.fabric.stream.states import LOST, REPLICA, STREAM, TENANT, copied

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
        """The frames of each producer, by (epoch, seq)."""
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
            self.live(*self.net.pop(n % min(len(self.net), 3)))

    def dup(self, n: int) -> None:
        if self.net:
            self.live(*self.net[n % len(self.net)])

    def live(self, epoch: int, first: int, last: int, frames: bytes) -> None:
        lines = self.reader.take_live(epoch, first, last, frames)
        if lines is None:
            self.take(self.reader.receive_live(epoch, first, last, frames))
        else:
            assert all(map(is_text, lines)), "the short way is for text alone"
            self.take([Run(epoch, first, lines)])

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
    held = gc.get_referents(f.reader)
    assert not any(isinstance(value, list | dict | set | tuple | bytes) for value in held), "no container in the reader"


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


@pytest.mark.parametrize("steered", (False, True))
def test_a_terminal_below_what_was_shown_counts_while_a_page_is_on_its_way(*, steered: bool) -> None:
    """The page was read before the cancel, and says that the stream is live."""
    state = StreamState(Epoch(1, "aa"), TENANT, b"")
    state.entries, state.last = [Entry(1, 1, 1, b'0"1"')], 1
    reader = Reader(Cursor(1, 0), "aa")
    reader.receive_page(entry_page(state, reader.cursor))
    reader.receive_live(1, 2, 3, b'0"2"\n0"3"')  # then a failover loses both
    reader.recheck()
    before = entry_page(state, reader.cursor)
    ends = cut_frames(Usage(), steered=steered)
    frames = b"\n".join(ends)
    assert reader.receive_live(1, 2, 1 + len(ends), frames) == []
    assert reader.receive_page(before) == []
    assert reader.need is Need.PAGE
    state.entries.append(Entry(1, 2, 1 + len(ends), frames))
    state.last, state.status = 1 + len(ends), "incomplete" if steered else "cancelled"
    told = reader.receive_page(entry_page(state, reader.cursor))
    told += reader.receive_page(entry_page(state, reader.cursor))
    assert reader.need is Need.NOTHING
    assert told == [Reset(1, 1), Run(1, 2, ends)]


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
