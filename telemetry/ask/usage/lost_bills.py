"""Figures that bills lack. The command that prints them is another process than the one that finds them."""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.ask.queries import HOUR_US


@dataclass(frozen=True)
class LostBills:
    """Figures that the bills of an hour, tenant and model lack.

    They are below 0 where an earlier row adjusted too much.
    """

    hour_us: int
    tenant: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    price_micro: int
    priced: bool
    """False: there is no bill to take the price from, and ``price_micro`` is 0."""
    number: int
    """Number of rows that adjust the hour already."""

    @property
    def id(self) -> str:
        return f"rebuilt:{self.tenant}:{self.hour_us // HOUR_US}:{self.model}:{self.number}"
