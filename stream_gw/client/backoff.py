"""Pauses between connection attempts, and what a close code asks for. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stream_gw.client.errors import GatewayError

BACKOFF_S_MIN: Final = 0.25
BACKOFF_S_MAX: Final = 8.0
STEADY_S: Final = 5.0  # lifetime of a connection after which counts of failures start again
REFRESHES_MAX: Final = 2
POLICY_CLOSES_MAX: Final = 3
HINT_S_MAX: Final = 60.0
WAIT_S_MAX: Final = 60.0
"""Longest ``retry_after_s`` that the client waits out. A longer one, such as a budget's, is the caller's to judge."""


def backoff_s(attempt: int, random: Callable[[], float]) -> float:
    """Return a random pause in seconds (full jitter), so that clients cut at one instant do not return together."""
    return float(random() * min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** min(attempt, 16)))


def is_waited_out(error: GatewayError) -> bool:
    """Return whether the client itself tries again after this error."""
    return error.retriable and (error.retry_after_s or 0) <= WAIT_S_MAX


@dataclass(slots=True)
class ReconnectPolicy:
    """Counts consecutive failures, and decides when and where to connect next."""

    random: Callable[[], float]
    can_refresh: bool
    attempt: int = 0
    refreshes: int = 0
    policy_closes: int = 0
    refresh: bool = False  # the next connection needs a new token
    rotate: bool = False  # the next connection should go elsewhere

    def receive_ready(self) -> None:
        """Reset the count of token refreshes: a connection is ready."""
        self.refreshes = 0

    def next_delay_s(self) -> float:
        delay = backoff_s(self.attempt, self.random)
        self.attempt += 1
        return delay

    def hint_s(self, after_s: float, lived_s: float) -> float:
        """Return the seconds until the client leaves a gateway that asked it to, at least ``after_s``.

        Where it is asked as soon as it is connected, every gateway may drain, so that connections are spread.
        """
        delay_s = after_s if lived_s > STEADY_S else max(after_s, self.next_delay_s())
        return min(delay_s, HINT_S_MAX)

    def receive_close(self, code: int, reason: str, lived_s: float) -> GatewayError | None:
        """Count a close; return the error when reconnecting cannot help."""
        if lived_s > STEADY_S:
            self.attempt = self.policy_closes = 0
        if code == 4403:
            return GatewayError("forbidden", "the gateway refuses this token", close_code=code)
        if code == 4401:
            self.refresh = True
            self.refreshes += 1
            if not self.can_refresh or self.refreshes > REFRESHES_MAX:
                return GatewayError("invalid_api_key", "the token is missing, unknown or expired", close_code=code)
        elif code in (1008, 1009):
            self.policy_closes += 1
            if self.policy_closes >= POLICY_CLOSES_MAX:
                return GatewayError(
                    "refused", f"closed {self.policy_closes} times with {code} {reason}", close_code=code
                )
        else:
            self.policy_closes = 0
            if code in (1013, 4429):
                self.attempt = max(self.attempt, 3)
            elif code == 1012:
                self.attempt = max(self.attempt, 2)  # all clients of this gateway were cut at this instant
            self.rotate = code != 4408
        return None
