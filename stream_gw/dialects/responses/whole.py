"""Collects a stream into one whole response: the object that its last event shows."""

from __future__ import annotations

from collections.abc import Sequence

from stream_fabric.errors import CursorInvalid
from stream_fabric.stream.frames import CHOICE_END_PREFIX, coalesce
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.responses.encoder import OpenResponsesEncoder, ResponsesEncoder

_ENCODERS: dict[str, type[ResponsesEncoder]] = {
    "openai.responses": ResponsesEncoder,
    "open.responses": OpenResponsesEncoder,
}
DIALECTS = tuple(_ENCODERS)


def encoder_of(facts: StreamFacts, dialect: str) -> ResponsesEncoder:
    """Make an encoder of one of the two dialects."""
    return _ENCODERS[dialect](facts)


def response_of(facts: StreamFacts, dialect: str, lines: list[bytes]) -> bytes:
    """Return the response after these frames, from the first one on, as JSON."""
    collector = ResponseCollector(facts, dialect)
    for line in coalesce(lines):
        collector.add(line)
    return collector.result()


def frames_before(facts: StreamFacts, dialect: str, lines: list[bytes], number: int) -> int:
    """Return how many of the frames have no event above ``number``. Raises CursorInvalid if no event has the number."""
    encoder = encoder_of(facts, dialect)
    encoder.opening()
    for seq, line in enumerate(lines, 1):
        encoder.observe(line)
        if encoder.next_number > number + 1:
            return seq - 1
    if number >= encoder.next_number:
        raise CursorInvalid(
            f"starting_after {number} lies ahead of the response, which has {encoder.next_number} events so far",
            param="starting_after",
        )
    return len(lines)


def encoder_after(facts: StreamFacts, dialect: str, seen: Sequence[bytes], number: int) -> ResponsesEncoder:
    """Make the encoder of a reader that has the frames ``seen``, and of the next one the events up to ``number``."""
    encoder = encoder_of(facts, dialect)
    for line in seen:
        encoder.observe(line)
    encoder.skip(number)
    return encoder


class ResponseCollector:
    """Collects frames. Memory is linear in the output."""

    def __init__(self, facts: StreamFacts, dialect: str) -> None:
        self._encoder = encoder_of(facts, dialect)
        self._has_reason = False

    def add(self, line: bytes) -> None:
        """Add the next frame."""
        self._has_reason = self._has_reason or line.startswith(CHOICE_END_PREFIX)
        self._encoder.observe(line)

    @property
    def has_all_reasons(self) -> bool:
        """True if the answer has its finish reason."""
        return self._has_reason

    def result(self) -> bytes:
        """Return the response as JSON."""
        return self._encoder.response()
