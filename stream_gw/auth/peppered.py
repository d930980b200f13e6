"""Digests of API keys. A fleet's pepper makes a stolen database useless for testing guessed keys."""

from __future__ import annotations

import hmac
from typing import NamedTuple

PEPPER_BYTES_MIN = 16
SHA256_PREFIX = "sha256:"
"""Begins the digest of a key that came from a keys file: the SHA-256 of the key without a pepper, in hex."""


def peppered_digest(key: str, pepper: bytes) -> str:
    """HMAC-SHA256 of the key in hex. One round is enough, because keys are long and random."""
    return hmac.digest(pepper, key.encode("utf-8", "surrogatepass"), "sha256").hex()


def pepper_id(pepper: bytes) -> str:
    """Return the id under which rows name the pepper of their key: 8 hex digits that do not tell the pepper."""
    return hmac.digest(pepper, b"stream-gw pepper id", "sha256").hex()[:8]


class Peppers(NamedTuple):
    """The fleet's peppers. ``previous``: accepted until its keys are rotated. Empty: there is none."""

    current: bytes = b""
    previous: bytes = b""

    def digests(self, key: str) -> tuple[str, ...]:
        """Return the key's digest with each pepper, always of all of them: the time does not tell which one matched."""
        if not self.previous:
            return (peppered_digest(key, self.current),)
        return peppered_digest(key, self.current), peppered_digest(key, self.previous)


NO_PEPPERS = Peppers()
