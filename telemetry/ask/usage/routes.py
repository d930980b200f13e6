"""HTTP handlers of usage: ``GET /usage``, ``POST /reconcile`` for the controller's nightly job, ``POST /rebuild``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from stream_fabric.errors import BadRequest, TooMany
from telemetry.ask.queries import HOUR_US
from telemetry.ask.reconcile import Settled, reconcile_hours
from telemetry.ask.store_ask import StoreAsk
from telemetry.ask.usage.hour_sums import correct_hour_sums
from telemetry.ask.usage.page import DAY_US, UsageQuery, usage_page
from telemetry.ask.usage.rebuild import rebuild
from telemetry.store.store import Store

Handler = Callable[[web.Request], Awaitable[Any]]
OpenSettled = Callable[[], AbstractAsyncContextManager[Settled]]
SHOWN_MAX = 20
"""Maximum disagreements in an answer; all are counted."""
_HOURS_MAX = 24 * 35


class ReconcileBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /reconcile``: whole hours in Unix time."""

    from_us: int
    until_us: int


class RebuildBody(ReconcileBody, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /rebuild``."""

    tenant: str = ""
    write: bool = False


class UsageRoutes:
    """``kept_days``: days that bills are kept. ``open_settled`` connects to the usage that Redis settled."""

    def __init__(
        self, store: Store, kept_days: int, open_settled: OpenSettled | None, now_us: Callable[[], int]
    ) -> None:
        self._store = store
        self._ask = StoreAsk(store)
        self._now_us = now_us
        self._kept_days = kept_days
        self._open_settled = open_settled
        self._comparing = asyncio.Lock()

    def routes(self, protected: Callable[[Handler], Handler]) -> list[web.RouteDef]:
        """Make the routes. ``protected`` wraps a handler: it checks the token and encodes the answer."""
        return [
            web.get("/usage", protected(self.usage)),
            web.post("/reconcile", protected(self.reconcile)),
            web.post("/rebuild", protected(self.rebuild)),
        ]

    async def usage(self, request: web.Request) -> Any:
        try:
            wanted = msgspec.convert(dict(request.query), UsageQuery, strict=False)
        except msgspec.ValidationError as error:
            raise BadRequest(f"query string: {error}") from None
        return await usage_page(self._ask, wanted, self._now_us(), self._kept_days)

    async def reconcile(self, request: web.Request) -> Any:
        """Compare settled with billed usage of closed hours, and make the sums by hour those of the bills."""
        body = _decode(await request.read(), ReconcileBody)
        async with self._one_at_a_time() as settled:
            kept_from_us = self._now_us() - (self._kept_days - 1) * DAY_US  # older bills may be deleted
            await correct_hour_sums(self._store, max(body.from_us, kept_from_us), body.until_us)
            report = await reconcile_hours(self._ask, settled, body.from_us, body.until_us)
        return {
            "from_us": report.from_us,
            "until_us": report.until_us,
            "settled_output": report.settled_output,
            "found": report.found,
            "drift_tokens": report.drift_tokens,
            "disagreements": [asdict(each) for each in report.disagreements[:SHOWN_MAX]],
        }

    async def rebuild(self, request: web.Request) -> Any:
        """List the bills that closed hours lack, and with ``write`` add them."""
        body = _decode(await request.read(), RebuildBody)
        async with self._one_at_a_time() as settled:
            lost = await rebuild(
                self._store, settled, body.from_us, body.until_us, self._now_us(), body.tenant, write=body.write
            )
        return {"lost": [asdict(each) for each in lost]}

    @asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[Settled]:
        """Connect to the settled usage. Raises TooMany while another comparison runs."""
        if self._open_settled is None:
            raise BadRequest("this process has no Redis to compare with")
        if self._comparing.locked():
            raise TooMany("a comparison with Redis is running; retry after 60 s", retry_after_s=60)
        async with self._comparing, self._open_settled() as settled:
            yield settled


_Body = TypeVar("_Body", bound=ReconcileBody)


def _decode(text: bytes, type_: type[_Body]) -> _Body:
    """Decode a body and check its range. Raises BadRequest."""
    try:
        body = msgspec.json.decode(text, type=type_)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the body is no valid request: {error}") from None
    if not 0 < body.until_us - body.from_us <= _HOURS_MAX * HOUR_US:
        raise BadRequest(f"compare 1 to {_HOURS_MAX} hours")
    return body
