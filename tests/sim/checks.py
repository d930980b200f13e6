"""Moderation and the check of structured replies in the simulation: answers come late, wrong ones among them."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stream_fabric.moderation.moderator import EndpointFailed, Moderator
from stream_fabric.stream.frames import Check

if TYPE_CHECKING:
    from tests.sim.world import World

PHRASES = ("", "", "the", "reader:", "every count", "facts explain")
"""One of them is flagged in answers; an empty one: nothing is."""


class Phrases:
    """``Rules`` that flag a phrase of an answer. The test's prompts and inputs have none of them."""

    def __init__(self, phrase: str) -> None:
        self._phrase = phrase

    def flagged(self, text: str) -> str | None:
        return "phrase" if self._phrase and self._phrase in text else None


class LateEndpoint:
    """``Endpoint``: some of its answers take long, and some do not come."""

    timeout_s = 2.0

    def __init__(self, rules: Phrases, apart: random.Random) -> None:
        self._rules = rules
        self._apart = apart
        self._fails = apart.choice((0.0, 0.0, 0.03))

    async def flagged(self, texts: Sequence[str]) -> str | None:
        await asyncio.sleep(self._apart.choice((0.0, 0.02, 0.5)) * self._apart.random())
        if self._apart.random() < self._fails:
            raise EndpointFailed("it does not answer")
        return next(filter(None, map(self._rules.flagged, texts)), None)


class LateChecker:
    """``Checker``: a reply fits or not by its text alone, and its check takes a while."""

    def __init__(self, apart: random.Random) -> None:
        self._apart = apart
        self.results: list[str] = []

    def on_result(self, result: str) -> None:
        self.results.append(result)

    async def check(self, schema: bytes, reply: str, tenant: str) -> Check:
        await asyncio.sleep(self._apart.choice((0.0, 0.05, 1.0)) * self._apart.random())
        dice = zlib.crc32(reply.encode()) % 10
        if dice == 0:
            return Check("unchecked", reason="no time")
        return Check("invalid", reason="it does not fit", path="/a") if dice < 6 else Check("valid")


def flagged_in(world: World) -> str:
    """Draw the phrase that moderation flags in this schedule; empty: none."""
    return random.Random(world.random.random()).choice(PHRASES) if "moderation" in world.faults else ""


def moderator_of(world: World) -> Moderator | None:
    """Make the moderator of all processes of a schedule whose tenant's plan asks for one."""
    if "moderation" not in world.faults:
        return None
    apart = random.Random(world.random.random())
    return moderator(world, None if apart.random() < 0.2 else apart)


def moderator(world: World, apart: random.Random | None) -> Moderator:
    """Make a moderator that flags ``world.flagged``: with an endpoint, or with rules alone if ``apart`` is None."""
    phrases = Phrases(world.flagged)
    rules: Any = phrases if apart is None else None
    endpoint: Any = None if apart is None else LateEndpoint(phrases, apart)
    return Moderator(rules, endpoint, lambda outcome, seconds: None, world.clock, fail_open=False)


def checker_of(world: World) -> LateChecker | None:
    """Make the checker of all replicas of a schedule whose requests ask for a JSON schema."""
    return LateChecker(random.Random(world.random.random())) if "checks" in world.faults else None
