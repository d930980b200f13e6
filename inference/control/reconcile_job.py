"""Nightly reconciliation: telemetry compares settled with billed usage, and budgets are raised to what was billed.

It also runs soon after Redis has lost its data, because budgets then begin at zero.

The comparison runs where the bills are; this job asks for it, shows the result, and corrects the accounts' budgets. It
runs in the leading controller. A comparison may be repeated: it makes the sums by hour those of the bills, and budgets
are only raised.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from inference.control.metrics import ControllerMetrics
from stream_fabric.accounts.ports import Accounts
from stream_fabric.errors import FabricError
from stream_fabric.ports import Clock
from stream_fabric.process.http_client import HTTP_ERRORS, open_session, read_body
from stream_fabric.stream.ids import TenantId

log = logging.getLogger(__name__)

_HOUR_US = 3_600_000_000
_DAY_US = 24 * _HOUR_US
_DAYS = 2
"""Days that are compared."""
_LATE_US = 600_000_000
"""Time after its end until an hour is closed: its last bills may be on their way."""
_TAKEN_US = 300_000_000
"""Time after taking the lead until it runs: the leader before may have ended with usage that disagrees."""
_MONTH = "%Y-%m"
_COMPARE_S = 3600.0
_ANSWER_BYTES_MAX = 8 << 20
_ERROR_CHARS_MAX = 200
_PAGE = 1500
_LOOK_S = 30.0
_RETRY_S = 600.0
_WATCHED_TENANTS = 50
"""Tenants with the most tokens whose counters are compared with what they were raised to."""


class BilledMonth(NamedTuple):
    """Sums of a tenant's bills in the closed hours of a month."""

    tenant: TenantId
    tokens: int
    micro: int


class _Compared(msgspec.Struct):
    found: int
    drift_tokens: int


class _TenantRow(msgspec.Struct, array_like=True):
    """A row of the query ``billed_tenants``."""

    tenant: str
    requests: int
    tokens: int
    price_micro: int


class _Rows(msgspec.Struct):
    rows: list[_TenantRow]


class ReconcileJob:
    """Runs in every controller; ``leads`` says whether this one acts. ``accounts`` None: budgets are not corrected.

    ``hour_utc``: hour of the day at whose 10th minute it runs.
    """

    def __init__(
        self,
        url: str,
        token: str,
        leads: Callable[[], bool],
        metrics: ControllerMetrics,
        clock: Clock,
        accounts: Accounts | None = None,
        *,
        hour_utc: int = 3,
        look_s: float = _LOOK_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"}
        self._leads = leads
        self._metrics = metrics
        self._clock = clock
        self._accounts = accounts
        self._due_us = hour_utc * _HOUR_US + _LATE_US
        self._look_s = look_s
        self._retry_s = retry_s
        self._done_us = clock.now_us()
        """Moment of the last reconciliation, or of the start."""
        self._raised: tuple[str, Sequence[BilledMonth]] = ("", ())
        """Month, and what the counters of some tenants were raised to at least."""

    async def run(self) -> None:
        """Run once a night until cancelled, and each hour while usage disagrees: a repair must end the alert.

        Also soon after taking the lead, because what the leader before had found is shown by nobody now, and at once
        after budgets were lost.
        """
        self._done_us = self._clock.now_us()
        due_us = next_due_us(self._done_us, self._due_us)
        led = False
        while True:
            await asyncio.sleep(self._look_s)
            now_us, leads = self._clock.now_us(), self._leads()
            self._metrics.receive_reconciled((now_us - self._done_us) / 1e6)
            if not leads:
                self._metrics.receive_comparison(0, 0)  # the leader's result holds alone
            elif not led:
                due_us = min(due_us, now_us + _TAKEN_US)
            led = leads
            if leads and await self._has_lost_budgets(now_us):
                log.warning("budgets are lost with Redis' data, raised to what was billed: month=%s", self._raised[0])
                due_us, self._raised = now_us, ("", ())
            if now_us < due_us:
                continue
            if not leads:
                due_us = next_due_us(now_us, self._due_us)
                self._done_us = now_us  # another controller reports this night
                continue
            try:
                agrees = await self.reconcile(now_us)
                due_us = next_due_us(now_us, self._due_us)
                due_us = due_us if agrees else min(due_us, now_us + _HOUR_US)
            except (*HTTP_ERRORS, FabricError) as error:
                log.warning("usage not reconciled, retrying: error=%s", error or type(error).__name__)
                due_us = now_us + int(self._retry_s * 1e6)

    async def reconcile(self, now_us: int) -> bool:
        """Compare the closed hours and raise budgets. Return False where usage disagrees.

        Raises one of ``HTTP_ERRORS`` or FabricError.
        """
        until_us = (now_us - _LATE_US) // _HOUR_US * _HOUR_US
        body = {"from_us": until_us - _DAYS * _DAY_US, "until_us": until_us}
        answer = await self._post("/reconcile", body)
        compared = msgspec.json.decode(answer, type=_Compared)
        if compared.found:
            log.error(
                'usage disagrees: hours=%d tokens=%d; see docs/runbook.md, "Alert: UsageDisagrees"',
                compared.found,
                compared.drift_tokens,
            )
        else:
            log.info("usage reconciled: until=%s", datetime.fromtimestamp(until_us / 1e6, UTC).isoformat())
        if self._accounts is not None:
            month, billed = await self.billed_month(until_us)
            for one in billed:
                await self._accounts.raise_to(one.tenant, f"tenant_month:{month}", one.tokens, one.micro)
            self._raised = month, heapq.nlargest(_WATCHED_TENANTS, billed, key=lambda one: one.tokens)
        self._metrics.receive_comparison(compared.found, compared.drift_tokens)
        self._done_us = self._clock.now_us()
        self._metrics.receive_reconciliation(self._done_us / 1e6)
        return not compared.found

    async def _has_lost_budgets(self, now_us: int) -> bool:
        """Whether a counter of this month is below what it was raised to. False while Redis does not answer."""
        month, raised = self._raised
        if self._accounts is None or month != datetime.fromtimestamp(now_us / 1e6, UTC).strftime(_MONTH):
            return False
        counter = f"tenant_month:{month}"
        try:
            found = await asyncio.gather(*(self._accounts.budgets(one.tenant, [counter]) for one in raised))
        except FabricError:  # the next look asks again
            return False
        return any(use[counter].tokens < one.tokens for use, one in zip(found, raised, strict=True))

    async def billed_month(self, until_us: int) -> tuple[str, list[BilledMonth]]:
        """Return the month that ends at ``until_us`` or later, as 2026-11, and what was billed in it until then.

        Raises one of ``HTTP_ERRORS``.
        """
        last = datetime.fromtimestamp((until_us - 1) // 1_000_000, UTC)
        begin = last.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        found: list[BilledMonth] = []
        while True:
            parameters = {
                "from_us": int(begin.timestamp()) * 1_000_000, "until_us": until_us, "tenant": "",
                "after": found[-1].tenant if found else "", "top": _PAGE,
            }  # fmt: skip
            body = {"query": "billed_tenants", "parameters": parameters, "rows_max": _PAGE}
            rows = msgspec.json.decode(await self._post("/query", body), type=_Rows).rows
            found += [BilledMonth(TenantId(row.tenant), row.tokens, row.price_micro) for row in rows]
            if len(rows) < _PAGE:
                return begin.strftime(_MONTH), found

    async def _post(self, path: str, body: object) -> bytes:
        async with (
            open_session(total_s=_COMPARE_S, headers=self._headers) as session,
            session.post(self._url + path, data=msgspec.json.encode(body), allow_redirects=False) as response,
        ):
            answer = await read_body(response, _ANSWER_BYTES_MAX)
            if response.status != 200:
                text = answer[:_ERROR_CHARS_MAX].decode(errors="replace")
                raise ValueError(f"stream-gw telemetry answered {response.status}: {text}")
            return answer


def next_due_us(now_us: int, due_us: int) -> int:
    """Return the next moment that lies ``due_us`` after midnight, UTC."""
    today_us = now_us - now_us % _DAY_US + due_us
    return today_us if today_us > now_us else today_us + _DAY_US
