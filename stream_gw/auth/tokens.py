"""Signs and verifies capability tokens. Pure.

A token is ``cap_`` and a JWT, signed with HS256. Its ``kid`` header names the secret that signed it, so a fleet can
change its secret while tokens of the old one are still in use. The key is derived from the secret for this one purpose:
a JWT that another program signed with the same secret is not a capability token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

import jwt
import msgspec

from stream_fabric.accounts.records import Scope

PREFIX = "cap_"
_ALGORITHM = "HS256"
_AUDIENCE = "stream-gw"
_STREAM_AUDIENCE = "stream-gw/stream"
"""Audience of tokens that are limited to one stream: a gateway of a release that does not know the limit refuses
them."""
SECRET_BYTES_MIN = 16
_VERIFIED_MAX = 1000
"""Verified tokens kept, so that a client's next request costs a look-up instead of 80 µs."""


class Claims(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rights that a token grants. ``exp``: unix seconds."""

    tenant: str
    scopes: list[Scope]
    exp: int
    user: str | None = None
    models: list[str] | None = None
    key: str | None = None
    """Id of the API key that minted it, which must still be valid; None: minted by an earlier release."""
    gen: int = 0
    """Generation of that key."""
    aud: str = _AUDIENCE
    stream: str | None = None
    """The only stream that the token may read; None: no such limit."""
    link: int = 0
    """Generation of that stream's links; a later one ends the token."""


class _UnnamedKeyClaims(msgspec.Struct, array_like=True):
    tenant: str
    scopes: list[Scope]
    user: str | None
    models: list[str] | None
    expires_at: float


class TokenSigner:
    """Signs with one secret and accepts that one and others. All gateways of a fleet share them."""

    def __init__(self, secret: bytes, accepted: Sequence[bytes] = ()) -> None:
        """Accept tokens that ``secret`` or one of ``accepted`` signed. Raises ValueError for a secret under 16
        bytes."""
        self._secrets = (secret, *accepted)
        if min(map(len, self._secrets)) < SECRET_BYTES_MIN:
            raise ValueError(f"each token secret must have at least {SECRET_BYTES_MIN} bytes")
        keys = [hmac.digest(each, b"stream-gw capability token", "sha256") for each in self._secrets]
        self._keys = {hashlib.sha256(key).hexdigest()[:8]: key for key in keys}
        self._signing_id = next(iter(self._keys))
        self._verified: dict[str, Claims] = {}

    def sign(self, claims: Claims) -> str:
        payload = msgspec.to_builtins(claims) | {"aud": _audience(claims)}
        key = self._keys[self._signing_id]
        return PREFIX + jwt.encode(payload, key, _ALGORITHM, headers={"kid": self._signing_id})

    def verify(self, token: str) -> Claims | None:
        """Return the claims of a token that one of our secrets signed, expired or not; else None."""
        claims = self._verified.get(token)
        if claims is not None or not token.isascii():
            return claims
        signed = token.removeprefix(PREFIX)
        try:
            claims = self._decode(signed) if signed.count(".") == 2 else self._decode_without_key_id(signed)
        except (jwt.InvalidTokenError, msgspec.MsgspecError, RecursionError):  # a header may be nested a thousand deep
            return None
        if claims is not None:
            self._verified[token] = claims
            if len(self._verified) > _VERIFIED_MAX:
                del self._verified[next(iter(self._verified))]
        return claims

    def _decode(self, signed: str) -> Claims | None:
        key = self._keys.get(jwt.get_unverified_header(signed).get("kid", ""))
        # 256 bits fill 43 characters but for two bits: several texts decode alike, and only one is canonical
        if key is None or _from_base64url(signed.rpartition(".")[2]) is None:
            return None
        # The caller compares ``exp`` with its own clock
        decoded = jwt.decode(
            signed,
            key,
            [_ALGORITHM],
            {"require": ["exp", "aud"], "verify_exp": False, "verify_iat": False, "verify_nbf": False},
            audience=(_AUDIENCE, _STREAM_AUDIENCE),
        )
        claims = msgspec.convert(decoded, Claims)
        return claims if claims.aud == _audience(claims) else None

    def _decode_without_key_id(self, signed: str) -> Claims | None:
        """Decode a token of the release before key ids: ``<claims>.<HMAC of the claims>``."""
        body, _, signature = signed.partition(".")
        expected = [_to_base64url(hmac.digest(secret, body.encode(), "sha256")) for secret in self._secrets]
        if not any(hmac.compare_digest(signature, each) for each in expected):
            return None
        claims = msgspec.json.decode(_from_base64url(body) or b"", type=_UnnamedKeyClaims)
        return Claims(claims.tenant, claims.scopes, int(claims.expires_at), claims.user, claims.models)


def _audience(claims: Claims) -> str:
    return _AUDIENCE if claims.stream is None else _STREAM_AUDIENCE


def _to_base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _from_base64url(text: str) -> bytes | None:
    """Decode base64url text without padding; None unless the text is the canonical encoding."""
    try:
        data = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if _to_base64url(data) == text else None
