"""Frames of earlier producers, appended again after Redis has lost the whole stream."""

from __future__ import annotations

from inference.agent.running import RunningStream
from stream_fabric.limits import FLUSH_BYTES_MAX, FLUSH_FRAMES_MAX
from stream_fabric.ports import StreamLog
from stream_fabric.stream.frames import ChoiceEnd, Delta, Note, Open, Usage, decode
from stream_fabric.stream.log import Append, AppendCode


async def append_prior(log: StreamLog, stream: RunningStream) -> None:
    """Append the frames up to the producer's base, in its epoch, as far as the log lacks them. Raises FabricError.

    After any other answer than that frames are there or lack, the producer's next append hears the same.
    """
    known = 0
    for request in _appends(stream):
        if request.last > known:
            (reply,) = await log.append(stream.partition, [request])
            if reply.code is AppendCode.GAP:  # another call has appended these
                known = reply.seq
            elif reply.code not in (AppendCode.OK, AppendCode.DUPLICATE):
                return


def _appends(stream: RunningStream) -> list[Append]:
    """Cut the frames into appends, each with the usage up to its last frame."""
    used, epoch = stream.producer.usage_at(stream.producer.base), stream.producer.epoch
    appends: list[Append] = []
    lines: list[bytes] = []
    structure, size, output = b"", 0, 0
    for seq, line in enumerate(stream.prior, 1):
        frame = decode(line)
        lines.append(line)
        size += len(line)
        if isinstance(frame, Delta):
            output += frame.tokens
        elif isinstance(frame, Open | ChoiceEnd) or (isinstance(frame, Note) and frame.kind == "prompt"):
            structure += b"%d %b\n" % (seq, line)
        is_last = seq == len(stream.prior)
        if is_last or len(lines) >= 8 * FLUSH_FRAMES_MAX or size >= 8 * FLUSH_BYTES_MAX:
            usage = used if is_last else Usage(used.prompt, used.cached, used.written, output, 0)
            first = seq - len(lines) + 1
            appends.append(Append(stream.name, epoch, first, seq, b"\n".join(lines), usage, structure))
            lines, structure, size = [], b"", 0
    return appends
