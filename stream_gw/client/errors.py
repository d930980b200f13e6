"""Errors that the client raises.

GatewayError        has code, retriable and, where known, request_id and close_code
├── ConnectionLost  no gateway was reachable for too long, or the client was closed
└── StreamBroken    text that was read is void or incomplete, by a reset or a gap
"""

from __future__ import annotations


class GatewayError(Exception):
    """Base of all errors that the client raises. ``code``: stable name of the error."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retriable: bool = False,
        retry_after_s: float | None = None,
        request_id: str | None = None,
        close_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retriable = retriable
        """True: the same call may succeed later."""
        self.retry_after_s = retry_after_s
        """Seconds after which to try again, where the gateway told."""
        self.request_id = request_id
        self.close_code = close_code
        """Close code of the WebSocket, where the connection was the fault."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class ConnectionLost(GatewayError):
    """No gateway was reachable for too long, or the client was closed."""


class StreamBroken(GatewayError):
    """Text that was read is void or incomplete, because of a reset or a gap."""
