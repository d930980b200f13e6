"""A stream that a caller may read, as ``create`` and ``follow`` return it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.ids import StreamId
from stream_gw.delivery.local_stream import Subscription
from stream_gw.delivery.outlet import Outlet
from stream_gw.dialects import encoder_for
from stream_gw.dialects.base import Encoder
from stream_gw.dialects.facts import StreamFacts
from stream_gw.streams.off_loop import frames_off_loop


@dataclass(frozen=True)
class OpenedStream:
    """A stream that a request created or attached to.

    The transport makes its encoder and its outlet, and calls ``subscribe`` once. Frames that arrive before that are not
    lost. A stream that was created has no frames yet: its transport calls ``subscribe`` in the same loop turn.
    """

    id: StreamId
    epoch: str
    facts: StreamFacts
    after: Cursor
    """Position of the reader: frames after it follow."""
    seen: tuple[bytes, ...]
    """Frames up to ``after`` that the encoder must know to continue."""
    subscribe: Callable[[Outlet], Subscription]
    """Deliver the stream to the outlet. Raises TooMany."""
    attached: bool
    queued: bool = False
    """True while no replica has room for its request."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Headers that tell the caller what is left of its limits."""

    async def encoder(self, dialect: str | None = None) -> Encoder:
        """Make an encoder that continues after ``after``. ``dialect`` None: the stream's own.

        Raises BadRequest for an unknown dialect, Unsupported for a dialect that cannot express this stream.
        """

        def make() -> Encoder:
            encoder = encoder_for(dialect or self.facts.own_dialect, self.facts)
            for line in self.seen:
                encoder.observe(line)
            return encoder

        return await frames_off_loop(len(self.seen), make)
