"""Durations of conditions, look after look. Pure."""

from __future__ import annotations


class ConditionTimers:
    """Seconds for which each named condition has held without a break."""

    def __init__(self) -> None:
        self._held_s: dict[str, float] = {}

    def update(self, name: str, holds: bool, passed_s: float) -> float:
        """Add the time since the last look, and return how long the condition has held, in seconds."""
        self._held_s[name] = self._held_s.get(name, 0.0) + passed_s if holds else 0.0
        return self._held_s[name]

    def reset(self, name: str) -> None:
        self._held_s[name] = 0.0

    def clear(self) -> None:
        self._held_s.clear()
