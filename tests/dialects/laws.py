"""Laws that hold for every dialect of one choice, and the readers that they are checked with."""

from __future__ import annotations

from stream_fabric.stream.frames import Delta, Open
from stream_gw.dialects import encoder_for
from stream_gw.dialects.base import Encoder
from tests.dialects.strategies import Stream

ONE_CHOICE = ("anthropic.messages", "openai.responses", "open.responses", "vercel.ui")


def reader(dialect: str, stream: Stream, after: int = 0) -> Encoder:
    """An encoder of the dialect that has observed the first ``after`` frames."""
    made = encoder_for(dialect, stream.facts)
    for line in stream.lines[:after]:
        made.observe(line)
    return made


def texts_by_block(stream: Stream) -> list[str]:
    """All text of texts, refusals, thoughts and calls, block by block in the order of opening."""
    said: dict[int, str] = {}
    for frame in stream.frames:
        if isinstance(frame, Open) and frame.kind != "item" and frame.form not in ("server", "redacted"):
            said[frame.block] = ""
        elif isinstance(frame, Delta) and frame.block in said:
            said[frame.block] += frame.text
    return list(said.values())
