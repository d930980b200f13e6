"""Cross-origin requests of browsers: allowed origins may call the API with a bearer token, never with cookies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Scope, Send

_MAX_AGE_S = 600
_LIMITS = [f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")]
_ANTHROPIC_LIMITS = [
    f"anthropic-ratelimit-{unit}-{what}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
]
_EXPOSED = ", ".join(
    [
        "x-stream-id",
        "x-stream-epoch",
        "x-request-id",
        "request-id",
        "x-served-model",
        "x-structured-output",
        "link",
        "retry-after",
        "retry-after-ms",
        "x-should-retry",
        "x-budget-warning",
        *_LIMITS,
        *_ANTHROPIC_LIMITS,
    ]
).encode()
_ANY = b"*"
_VARY = (b"vary", b"Origin")

Headers = list[tuple[bytes, bytes]]


class CorsPolicy:
    """Allowed origins. Without any, no response has a CORS header."""

    def __init__(self, origins: str) -> None:
        """``origins``: exact origins, separated by commas; ``*``: every origin; empty: none."""
        self._origins = frozenset(origins.encode().split(b",")) - {b""}

    def sender(self, scope: Scope, send: Send) -> Send:
        """Return ``send``, or for a request of an origin one that adds the CORS headers to the response's head."""
        if not self._origins:
            return send
        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        if origin is None:
            return send
        headers = self._headers(origin)

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        return send_with_headers

    def _headers(self, origin: bytes) -> Headers:
        if _ANY in self._origins:
            return [(b"access-control-allow-origin", _ANY), (b"access-control-expose-headers", _EXPOSED)]
        if origin not in self._origins:
            return [_VARY]
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED), _VARY]

    def preflight(self, headers: Mapping[bytes, bytes], methods: Iterable[str]) -> Headers | None:
        """Return the further headers of the answer to a preflight; None: it is none, or its origin is not allowed."""
        origin = headers.get(b"origin")
        if origin is None or b"access-control-request-method" not in headers:
            return None
        if self._origins.isdisjoint((_ANY, origin)):
            return None
        found = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", b"%d" % _MAX_AGE_S),
        ]
        # Any header may be sent: a credential is always in one, so the choice of others gives no right
        asked = headers.get(b"access-control-request-headers")
        return found if asked is None else [*found, (b"access-control-allow-headers", asked)]
