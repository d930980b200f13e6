"""The safety switch for bills: whether a replica takes requests while their bills can be neither delivered nor kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from stream_fabric.limits import USAGE_TTL_S

log = logging.getLogger(__name__)

ServeWithoutBills = Literal["reconstruct", "never"]
RECONSTRUCT_S = USAGE_TTL_S - 86_400
"""Time for which Redis's usage account can reconstruct lost bills: its lifetime less a day to do it."""


class BillGuard:
    """``at_risk``: whether new bills would be lost now.

    ``reconstruct`` serves on for as long as Redis's account can reconstruct the bills, then as ``never``.
    """

    def __init__(self, policy: ServeWithoutBills, at_risk: Callable[[], bool]) -> None:
        self._serve_s = RECONSTRUCT_S if policy == "reconstruct" else 0.0
        self._at_risk = at_risk
        self._since: float | None = None
        self._stopped = False

    @property
    def at_risk(self) -> bool:
        """Whether bills could be lost at the last check."""
        return self._since is not None

    def refusal(self, now: float) -> str:
        """Return why the replica takes no requests at the moment ``now``; empty: it takes them."""
        if not self._at_risk():
            if self._since is not None:
                log.warning("bills can be kept again: taking requests")
            self._since, self._stopped = None, False
            return ""
        if self._since is None:
            self._since = now
            log.error(
                'bills can neither be delivered nor kept: serving_s=%g; see docs/runbook.md, "Alert: BillsAtRisk"',
                self._serve_s,
            )
        if now - self._since < self._serve_s:
            return ""
        if not self._stopped:
            self._stopped = True
            log.error("taking no requests until bills can be delivered or kept")
        return "bills can neither be delivered nor kept"
