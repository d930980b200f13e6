"""Positions in a stream. A position is (epoch, seq), never a bare number."""

from __future__ import annotations

from typing import NamedTuple

from stream_fabric.errors import CursorInvalid

_DIGITS_MAX = 15


def _parse_number(text: str, whole: str) -> int:
    """Parse one number of the cursor ``whole``. Raises CursorInvalid."""
    # isdecimal() alone lets other scripts' digits and leading zeros through: one spelling a position
    if not (text.isascii() and text.isdecimal()) or len(text) > _DIGITS_MAX or (text[0] == "0" and text != "0"):
        raise CursorInvalid(f"{whole[:64]!r} is not a cursor; a cursor is <epoch>-<seq>, for example 1-57")
    return int(text)


class Cursor(NamedTuple):
    """The last frame a client applied: ``epoch`` from 1, ``seq`` from 0 (nothing applied yet)."""

    epoch: int
    seq: int

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Read ``<epoch>-<seq>``. Raises CursorInvalid."""
        epoch, dash, seq = text.partition("-")
        if not (epoch and dash and seq):
            raise CursorInvalid(f"{text[:64]!r} is not a cursor; a cursor is <epoch>-<seq>, for example 1-57")
        return cls(_parse_number(epoch, text), _parse_number(seq, text))

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}"


class Epoch(NamedTuple):
    """One producer's period of a stream, written as ``n.nonce``.

    The nonce distinguishes two takeovers that both became ``n + 1`` because of a split fabric.
    """

    n: int
    nonce: str

    @classmethod
    def parse(cls, text: str) -> Epoch:
        n, _, nonce = text.partition(".")
        return cls(int(n), nonce)

    def __str__(self) -> str:
        return f"{self.n}.{self.nonce}"


BEGINNING = Cursor(1, 0)
END = Cursor(1 << 31, 0)
"""Position after all frames of a log, whose meta alone is then read."""
