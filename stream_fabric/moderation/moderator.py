"""Checks text with the configured rules and endpoint, and decides what becomes of text that cannot be checked."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Literal

from stream_fabric.errors import ModerationUnavailable
from stream_fabric.limits import MODERATION_INPUTS_MAX, MODERATION_OVERLAP_CHARS, MODERATION_PIECE_CHARS
from stream_fabric.moderation.rules import Rules, read_rules
from stream_fabric.moderation.settings import ModerationSettings
from stream_fabric.ports import Clock

if TYPE_CHECKING:
    from stream_fabric.moderation.remote import Endpoint

log = logging.getLogger(__name__)

Outcome = Literal["passed", "flagged", "failed"]
OnChecked = Callable[[Outcome, float], None]
"""Called for each check with its outcome and its seconds."""


class EndpointFailed(Exception):
    """The endpoint gave no answer that decides."""


class Moderator:
    """Local rules first, then the endpoint. ``fail_open``: text passes when the endpoint does not answer."""

    def __init__(
        self, rules: Rules | None, endpoint: Endpoint | None, on_checked: OnChecked, clock: Clock, *, fail_open: bool
    ) -> None:
        assert rules is not None or endpoint is not None
        self._rules = rules
        self._endpoint = endpoint
        self._on_checked = on_checked
        self._clock = clock
        self._fail_open = fail_open

    @property
    def is_local(self) -> bool:
        """True if ``check_local`` decides alone."""
        return self._endpoint is None

    def seconds_max(self, size: int) -> float:
        """Return the longest time that the endpoint may take for the texts of a body of ``size`` bytes."""
        if self._endpoint is None:
            return 0.0
        pieces = size // (MODERATION_PIECE_CHARS - MODERATION_OVERLAP_CHARS)
        return (math.ceil(pieces / MODERATION_INPUTS_MAX) + 1) * self._endpoint.timeout_s

    def check_local(self, texts: Sequence[str]) -> str | None:
        """Check the texts with the local rules; return the category that one of them breaks."""
        began = self._clock.monotonic_us()
        rules = self._rules
        category = None if rules is None else next(filter(None, map(rules.flagged, texts)), None)
        if self.is_local or category is not None:
            self._record("passed" if category is None else "flagged", began)
        return category

    async def check(self, texts: Sequence[str]) -> str | None:
        """Check the texts; return the category that one of them breaks. Raises ModerationUnavailable."""
        texts = [text for text in texts if text]
        category = self.check_local(texts)
        if category is not None or self._endpoint is None:
            return category
        began = self._clock.monotonic_us()
        pieces = [piece for text in texts for piece in _pieces(text)]
        try:
            for start in range(0, len(pieces), MODERATION_INPUTS_MAX):
                category = await self._endpoint.flagged(pieces[start : start + MODERATION_INPUTS_MAX])
                if category is not None:
                    break
        except EndpointFailed as error:
            self._record("failed", began)
            log.warning("moderation endpoint failed: fail_open=%s error=%s", self._fail_open, error)
            if self._fail_open:
                return None
            raise ModerationUnavailable("content could not be checked by moderation; retry in a moment") from error
        self._record("passed" if category is None else "flagged", began)
        return category

    def _record(self, outcome: Outcome, began_us: int) -> None:
        self._on_checked(outcome, (self._clock.monotonic_us() - began_us) / 1e6)


def _pieces(text: str) -> list[str]:
    """Return the text in pieces that an endpoint takes, which overlap."""
    step = MODERATION_PIECE_CHARS - MODERATION_OVERLAP_CHARS
    return [
        text[at : at + MODERATION_PIECE_CHARS] for at in range(0, max(len(text) - MODERATION_OVERLAP_CHARS, 1), step)
    ]


@contextlib.asynccontextmanager
async def open_moderator(
    settings: ModerationSettings, on_checked: OnChecked, clock: Clock
) -> AsyncIterator[Moderator | None]:
    """Open what the settings name; None: they name nothing. Raises ValueError or OSError for a wrong file of rules."""
    rules = None if settings.moderation_rules_file is None else read_rules(settings.moderation_rules_file)
    if not settings.moderation_url:
        fail_open = settings.moderation_fail == "open"
        yield None if rules is None else Moderator(rules, None, on_checked, clock, fail_open=fail_open)
        return
    # Most processes have no endpoint, and to import its client is a fifth of a gateway's start
    from stream_fabric.moderation.remote import Endpoint
    from stream_fabric.process.http_client import open_session

    key = settings.moderation_key.get_secret_value()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with open_session(total_s=None, headers=headers) as session:
        endpoint = Endpoint(session, settings.moderation_url, settings.moderation_model, settings.moderation_timeout_s)
        yield Moderator(rules, endpoint, on_checked, clock, fail_open=settings.moderation_fail == "open")


def unconfigured() -> ModerationUnavailable:
    """Make the error of content whose plan asks for moderation where none is configured."""
    return ModerationUnavailable(
        "the plan asks for moderation and this process has none; set STREAM_GW_MODERATION_URL or "
        "STREAM_GW_MODERATION_RULES_FILE of gateways and agents"
    )
