"""Digests of API keys. A fleet's pepper makes a stolen database useless for testing guessed keys."""

from __future__ import annotations

import hmac

PEPPER_BYTES_MIN = 16
SHA256_PREFIX = "sha256:"
"""Begins the digest of a key that came from a keys file: the SHA-256 of the key without a pepper, in hex."""


def peppered_digest(key: str, pepper: bytes) -> str:
    """HMAC-SHA256 of the key in hex. One round is enough, because keys are long and random."""
    return hmac.digest(pepper, key.encode("utf-8", "surrogatepass"), "sha256").hex()
