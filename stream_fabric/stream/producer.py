"""One stream's producer, sans I/O: takes frames from an engine and replies from the log, returns what to append.

It keeps every frame until the terminal is acknowledged, so that (epoch, seq) names one byte string for ever: a log that
lost its tail, or everything, gets the same bytes again.
"""

from __future__ import annotations

from typing import Literal

from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.frames import End, Usage, encode
from stream_fabric.stream.ids import StreamId
from stream_fabric.stream.log import Append, AppendCode, AppendReply, Head, cut_frames

Outcome = Literal["", "stop", "fenced", "create", "ended", "inputs"]
"""Action for the caller after a reply:

- empty: none
- ``stop``: stop the engine
- ``fenced``: stop the engine, because another producer has the stream
- ``create``: create the stream again, with the frames up to the base
- ``ended``: none; the terminal is in the log
- ``inputs``: read the stream's inputs, and call ``receive_inputs``
"""


UNKNOWN_MAX = 64
"""Number of appends to a stream that does not exist yet (about one second); then the producer stops."""


class Producer:
    """States: live, then ending (the terminal is queued), then ended (acknowledged); or stopped by another process.

    ``base``: last frame before its epoch when it takes a stream over; otherwise 0.
    """

    __slots__ = (
        "_answered",
        "_closing",
        "_firm",
        "_frames",
        "_held",
        "_output",
        "_unknown",
        "_usages",
        "_used_before",
        "acked",
        "base",
        "bytes_held",
        "created",
        "ended",
        "epoch",
        "in_flight",
        "inputs",
        "keeps_earlier",
        "sent",
        "status",
        "stopped",
        "stream",
        "structure",
        "told",
        "usage",
    )

    def __init__(self, stream: StreamId, epoch: Epoch, base: int = 0) -> None:
        self.stream = stream
        self.epoch = str(epoch)
        self.base = base
        """Last frame before this epoch; earlier frames are another producer's."""
        self._used_before = Usage()
        self._frames: list[bytes] = []
        self.structure: list[tuple[int, bytes]] = []
        self.acked = base
        self.sent = base
        self.in_flight = False
        self.created = base > 0
        self.keeps_earlier = not base
        """The caller has the frames up to the base, and can append them again."""
        self.status: Literal["", "completed", "cancelled", "failed", "incomplete"] = ""
        self.ended = False
        self.stopped = False
        self.usage = self._used_before
        """Usage of the whole stream, as far as known."""
        self.inputs = 0
        """Number of the stream's inputs that the producer knows of."""
        self.told = 0
        """Number of the stream's inputs by the log's last reply."""
        self._answered: list[tuple[int, int]] = []
        """Frames that answer inputs: (seq, inputs answered with it)."""
        self._closing = 0
        """Frame that ends the answer, if no other input waits; 0: there is none."""
        self._held = False
        """The log has refused that frame."""
        self._firm = False
        """The log may have held that frame, and readers may have seen it: it stays."""
        self._unknown = 0
        self._output: list[int] = []
        self._usages: list[Usage] = []
        self.bytes_held = 0

    def receive_prior_usage(self, usage: Usage) -> None:
        """Set the usage that earlier producers of the stream have counted; called before the first frame."""
        self._used_before = self.usage = usage

    @property
    def last(self) -> int:
        """Seq of the last frame that the producer has taken."""
        return self.base + len(self._frames)

    @property
    def last_frame(self) -> bytes | None:
        """The last frame that the producer has taken; None: it has taken none."""
        return self._frames[-1] if self._frames else None

    @property
    def has_begun(self) -> bool:
        """Whether it has taken a frame, or none was made before it. Else what was used before it may be unknown yet."""
        return not self.base or self.last > self.base

    @property
    def pending(self) -> int:
        """Number of frames still to append: neither acknowledged by the log nor in the append in flight."""
        return 0 if self.stopped else self.last - (self.sent if self.in_flight else self.acked)

    def usage_at(self, seq: int) -> Usage:
        """Usage of the stream up to the frame ``seq``; the same for every call."""
        index = seq - self.base - 1
        if not 0 <= index < len(self._output):
            return self._used_before
        u, output = self._usages[index], self._output[index]
        return Usage(u.prompt, u.cached, u.written, output, min(u.reasoning, output))

    def frames_after(self, seq: int) -> list[bytes]:
        """Return the frames above ``seq``, which is not before the base."""
        return self._frames[seq - self.base :]

    def push(self, line: bytes, tokens: int = 0, *, structural: bool = False, closes: bool = False) -> None:
        """Take one encoded frame with ``tokens`` output tokens. ``structural``: it opens or closes a block. ``closes``:
        it ends the answer, unless the stream gets an input first."""
        assert not self.status, "nothing follows a terminal"
        self._output.append(tokens + (self._output[-1] if self._output else self._used_before.output))
        self._usages.append(self.usage)
        self._frames.append(line)
        self.bytes_held += len(line)
        if structural:
            self.structure.append((self.last, line))
        if closes and not self._closing:
            self._closing = self.last

    def push_answer(self, line: bytes, *, structural: bool) -> None:
        """Take a frame that answers inputs: those of the last ``receive_inputs``."""
        self.push(line, structural=structural)
        self._answered.append((self.last, self.inputs))

    def receive_inputs(self, count: int) -> None:
        """Receive that the stream's inputs were read: ``count`` are known now."""
        self.inputs, self._held = count, False

    @property
    def is_closing(self) -> bool:
        """Whether the producer has taken the end of the answer."""
        return self._closing > 0

    @property
    def is_held(self) -> bool:
        """Whether the log has refused the end of the answer, because inputs wait."""
        return self._held

    def take_back_end(self) -> None:
        """Drop the end of the answer that the log has refused, and everything after it: the stream goes on."""
        assert self._held
        kept = self._closing - 1
        self._drop_after(kept)
        self.status, self._closing, self._held = "", 0, False

    def _drop_after(self, seq: int) -> None:
        index = max(seq - self.base, 0)
        self.bytes_held -= sum(map(len, self._frames[index : len(self._output)]))
        for each in (self._frames, self._output, self._usages):
            del each[index:]
        self.structure = [(at, line) for at, line in self.structure if at <= seq]
        self._answered = [(at, count) for at, count in self._answered if at <= seq]

    def finish(self, end: End) -> None:
        """Take the terminal; no frame may follow it."""
        assert not self.status, "a stream has one terminal"
        if end.status == "cancelled":  # byte-identical to the log's own terminal, which may come first
            end = End("cancelled", self.usage_at(self.last))
        self._frames.append(encode(end))
        if end.usage is not None:
            self.usage = end.usage
        self.status = end.status

    def append_to_send(self, frames_max: int, bytes_max: int) -> Append | None:
        """Make the next append, or None while no frame waits or an append is on its way.

        An append has at least one frame, then as many as fit. If more than ``frames_max`` frames wait (after a loss),
        both limits are 8 times higher.
        """
        if self.in_flight or self.stopped or self._held or self.acked == self.last:
            return None
        first = self.acked + 1
        base, last = self.base, self.last
        if last - self.acked > frames_max:
            frames_max, bytes_max = frames_max * 8, bytes_max * 8
        stop, size = self.acked, 0
        while stop < last and stop - self.acked < frames_max:
            size += len(self._frames[stop - base])
            if size > bytes_max and stop > self.acked:
                break
            stop += 1
        whole = stop == last
        structure = b""
        if self.structure and self.structure[-1][0] >= first:  # seldom
            structure = b"".join(b"%d %b\n" % (seq, line) for seq, line in self.structure if first <= seq <= stop)
        answered = [count for seq, count in self._answered if first <= seq <= stop] if self._answered else None
        closes = first <= self._closing <= stop and not self._firm
        self.in_flight = True
        self.sent = stop
        return Append(
            self.stream,
            self.epoch,
            first,
            stop,
            b"\n".join(self._frames[self.acked - base : stop - base]),
            self.usage if whole and self.status else self.usage_at(stop),
            structure,
            self.status if whole else "",
            self.inputs if closes else answered[-1] if answered else None,
            closes,
        )

    def receive_reply(self, reply: AppendReply) -> Outcome:
        """Take the reply to the append; return what the caller has to do."""
        self.in_flight, self.told = False, reply.inputs
        if self.ended:  # a cancel was heard of before this reply
            return ""
        match reply.code:
            case AppendCode.OK | AppendCode.DUPLICATE:
                self.created = True
                # The log may hold more than was sent last: an earlier append whose reply was lost
                self.acked = min(reply.seq, self.last)
                if self.status and self.acked == self.last:
                    self.ended = True
                    return "ended"
                return "inputs" if reply.inputs != self.inputs and not self.is_closed else ""
            case AppendCode.INPUTS:
                self._held = True
                return "inputs"
            case AppendCode.GAP if reply.seq >= self.base:
                self._firm = self._firm or self.is_closed
                self.acked = min(reply.seq, self.last)
                return ""
            case AppendCode.CANCELLED | AppendCode.STEERED:
                self.receive_cancel(reply.seq, steered=reply.code is AppendCode.STEERED)
                return "stop"
            case AppendCode.GAP | AppendCode.NOSTREAM if self.created:
                return self._begin_again()
            case AppendCode.NOSTREAM:
                # Its creation may still be on its way: a request and its stream travel side by side
                self._unknown += 1
                if self._unknown < UNKNOWN_MAX:
                    return ""
        # Fenced, closed or never created
        self.stopped = True
        return "fenced" if reply.code is AppendCode.FENCED else "stop"

    def _begin_again(self) -> Outcome:
        """The log has lost frames up to the base: all are appended again, unless nobody has the earlier ones."""
        if not self.keeps_earlier:
            self.stopped = True
            return "stop"
        self._firm = self._firm or self.is_closed
        self.acked, self.ended = self.base, False
        return "create"

    def receive_lost(self) -> None:
        """Let ``append_to_send`` repeat the append, because its reply was lost."""
        self.in_flight = False
        self._firm = self._firm or 0 < self._closing <= self.sent

    @property
    def is_closed(self) -> bool:
        """Whether the log has the end of the answer."""
        return 0 < self._closing <= self.acked

    def receive_cancel(self, at: int, *, steered: bool = False) -> None:
        """Drop the frames above seq ``at``, where the log cancelled or steered the stream, and end the stream there.

        The kept frames and the terminal can repair a Redis failover that loses them.
        """
        if self.ended or self.stopped:
            return
        self.usage = self.usage_at(at)
        self._drop_after(at)
        self.status, self._closing, self._held = "", 0, False
        *before, end = cut_frames(self.usage, steered=steered)
        for line in before:
            self.push(line, structural=True)
        self._frames.append(end)
        self.status = "incomplete" if steered else "cancelled"
        self.created = True
        self.acked = self.sent = self.last
        self.in_flight = False
        self.ended = True

    def receive_head(self, head: Head | None) -> Outcome:
        """Take the stream's head in the log (None: no stream); return what the caller has to do."""
        if self.in_flight or self.stopped:
            return ""
        if head is None:
            if not self.created:
                return ""
            return self._begin_again()
        self.told = head.inputs
        if str(head.epoch) != self.epoch:
            self.stopped = True
            return "fenced"
        if head.cancelled_at >= 0 and not self.ended:
            self.receive_cancel(head.cancelled_at, steered=head.status == "incomplete")
            return "stop"
        if head.status == "live" and head.last < self.acked:  # a failover lost the tail
            if head.last < self.base:
                return self._begin_again()
            self._firm = self._firm or self.is_closed
            self.acked, self.ended = head.last, False
            return ""
        if head.status == "live" and head.inputs != self.inputs and not self.is_closed and not self.ended:
            return "inputs"
        return ""
