"""Compaction items: what they stand for is sealed for its tenant, and expanded into messages when it comes back.

One that a client asked for has a summary. One that a response began with has a window, which stands for all items
before it: those that were kept as they are, with a summary of the others.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from stream_fabric.errors import BadRequest
from stream_fabric.ports import Random
from stream_fabric.stream.ids import TenantId
from stream_gw.dialects.responses.truncation import SUMMARY
from stream_gw.responses.records import Item

_SUMMARY, _WINDOW = b"\x01", b"\x02"
"""First byte of what is sealed: what is in it."""
_NONCE_BYTES = 12
SUMMARY_TITLE = "Summary of the earlier part of this conversation:\n\n"


class Seals:
    """Seals texts with the first secret; opens those of every secret. AES-256-GCM, bound to the tenant."""

    def __init__(self, secrets: Sequence[bytes], random: Random) -> None:
        """``secrets``: at least one; further ones are those before."""
        self._ciphers = [
            AESGCM(HKDF(SHA256(), 32, salt=None, info=b"stream-gw compaction").derive(secret)) for secret in secrets
        ]
        self._random = random

    def seal(self, tenant: TenantId, summary: str) -> str:
        return self._seal(tenant, summary.encode(), _SUMMARY)

    def seal_window(self, tenant: TenantId, items: list[Item]) -> str:
        """Seal items that stand for all items before them."""
        return self._seal(tenant, msgspec.json.encode(items), _WINDOW)

    def _seal(self, tenant: TenantId, data: bytes, version: bytes) -> str:
        nonce = self._random.token_bytes(_NONCE_BYTES)
        sealed = self._ciphers[0].encrypt(nonce, zlib.compress(data), version + tenant.encode())
        return base64.urlsafe_b64encode(version + nonce + sealed).decode()

    def open(self, tenant: TenantId, sealed: str) -> str | None:
        """Return what was sealed, as text; None: it was not sealed here for this tenant."""
        try:
            data = base64.urlsafe_b64decode(sealed.encode("ascii"))
        except (binascii.Error, ValueError):
            return None
        version, nonce, rest = data[:1], data[1 : 1 + _NONCE_BYTES], data[1 + _NONCE_BYTES :]
        if version not in (_SUMMARY, _WINDOW) or len(nonce) != _NONCE_BYTES:
            return None
        for cipher in self._ciphers:
            try:
                return zlib.decompress(cipher.decrypt(nonce, rest, version + tenant.encode())).decode()
            except InvalidTag:
                continue
        return None

    def expanded(self, tenant: TenantId, item: Item) -> list[Item]:
        """Return the messages that a compaction item stands for. Raises BadRequest."""
        content = item.get("encrypted_content")
        text = self.open(tenant, content) if isinstance(content, str) else None
        if text is None:
            raise BadRequest(
                "a compaction item cannot be read: send it as it was received, to the platform that made it, with a "
                "key of the same tenant",
                param="input",
            )
        if is_window(item):
            return msgspec.json.decode(text, type=list[Item])
        # Templates of chats refuse a system message in the middle
        content = [{"type": "output_text", "text": SUMMARY_TITLE + text}]
        return [{"type": "message", "role": "assistant", "content": content, SUMMARY: True}]


def is_window(item: Item) -> bool:
    """Whether an item is a compaction that stands for all items before it."""
    content = item.get("encrypted_content")
    if item.get("type") != "compaction" or not isinstance(content, str):
        return False
    try:
        return base64.urlsafe_b64decode(content[:4].encode("ascii"))[:1] == _WINDOW
    except ValueError:
        return False
