"""The cookie that carries a capability token: a browser's ``EventSource`` cannot send headers of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from stream_fabric.errors import BadRequest, Forbidden
from stream_fabric.limits import COOKIE_BYTES_MAX
from stream_gw.auth.principal import Principal

COOKIE = "stream_gw"


def cookie_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the token in a request's cookie, or None."""
    for name, value in headers:
        if name == b"cookie":
            for pair in value.split(b";"):
                key, _, token = pair.strip().partition(b"=")
                if key == COOKIE.encode():
                    return token.decode("latin-1")
    return None


def cookie_set(who: Principal, token: str, now: float, headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """Make the ``Set-Cookie`` header that stores the token until it expires. Raises Forbidden or BadRequest."""
    if who.expires_at is None:
        raise Forbidden("an API key must not go into a cookie; mint a capability token with POST /v1/tokens")
    who.require("read")
    if len(COOKIE) + len(token) > COOKIE_BYTES_MAX:
        raise BadRequest(
            f"the token does not fit into a cookie of {COOKIE_BYTES_MAX} bytes; mint one that names fewer models"
        )
    return _set_cookie(token, int(who.expires_at - now), headers)


def cookie_cleared(headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """Make the ``Set-Cookie`` header that deletes the cookie."""
    return _set_cookie("", 0, headers)


def _set_cookie(value: str, max_age_s: int, headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    secure = "" if _is_plain_and_local(headers) else "; Secure"
    cookie = f"{COOKIE}={value}; HttpOnly; SameSite=Strict; Path=/v1/streams; Max-Age={max_age_s}{secure}"
    return b"set-cookie", cookie.encode("latin-1")


def _is_plain_and_local(headers: Mapping[bytes, bytes]) -> bool:
    """True for plain HTTP within one machine, where some browsers refuse ``Secure`` cookies.

    A proxy may have put its own address into ``Host``, so every header that indicates a remote client counts. Headers
    are trusted only for making the cookie stricter.
    """
    if headers.get(b"x-forwarded-proto", b"http") != b"http":
        return False
    origin = headers.get(b"origin")
    if origin is not None and not (origin.startswith(b"http://") and _is_loopback(origin[7:])):
        return False
    return _is_loopback(headers.get(b"host", b""))


def _is_loopback(authority: bytes) -> bool:
    try:
        name = urlsplit("//" + authority.decode("latin-1")).hostname or ""
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False
