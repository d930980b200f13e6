"""Learns from the traces and from its own looks what each declared pool is like, and keeps it in Redis.

Telemetry may be away: what was learned stays, and only its age grows. Redis may lose it: controllers put back what they
know.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

import aiohttp
import msgspec

from inference.control.lessons import ArrivalRow, LengthsRow, Snapshot, SpeedRow, jumps, routes, speeds
from inference.control.profile import DAY_S, SLOT_S, WEEK_S, WEEKS, learned
from stream_fabric.errors import FabricUnavailable
from stream_fabric.learned import decode_learned, started
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.wire import ReplyError

log = logging.getLogger(__name__)

_LOAD_EVERY_S = 60.0
_LEARN_EVERY_S = 600.0
_TIMEOUT_S = 30.0
_SPAN_S = 6 * DAY_S
"""An answer has no more rows than these have slots."""
_FEW_ROWS = 100
_LENGTHS_S = 3 * DAY_S
_SPEEDS_S = WEEK_S

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Snapshot)
Row = TypeVar("Row")


class _Answer(msgspec.Struct, Generic[Row]):
    rows: list[Row]


class Learner:
    """``url`` of stream-gw telemetry; empty: what others have learned is used. ``leads``: whether this controller does,
    and is the one to ask."""

    def __init__(
        self, url: str, token: str, pools: Collection[str], control: RedisControl, leads: Callable[[], bool]
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._pools = pools
        self._control = control
        self._leads = leads
        self._known: dict[str, Snapshot] = {}
        self._starts: dict[str, list[float]] = {}
        """That are not in Redis yet."""

    @property
    def known(self) -> Mapping[str, Snapshot]:
        """By pool."""
        return self._known

    def receive_starts(self, pool: str, took_s: Sequence[float]) -> None:
        """Replicas have come, so long after they were asked for."""
        self._starts.setdefault(pool, []).extend(took_s)

    async def run(self) -> None:
        while True:
            for pool in self._pools:
                try:
                    await self._tend(pool)
                except (FabricUnavailable, ReplyError) as error:
                    log.warning("what is known of pool %s cannot be read: %s", pool, error)
            await asyncio.sleep(_LOAD_EVERY_S * random.uniform(0.9, 1.0))

    async def _tend(self, pool: str) -> None:
        """What stands in Redis is what is known, unless it is lost: whoever leads writes it again."""
        stored = await self._stored(pool)
        known = stored or self._known.get(pool) or Snapshot()
        starts = self._starts.pop(pool, [])
        if self._leads():
            known = msgspec.structs.replace(known, starts_s=started(known.starts_s, starts))
            known = await self._taught(pool, known, time.time())
            if known != (stored or Snapshot()):
                try:
                    await self._control.put_learned(pool, _encoder.encode(known))
                except (FabricUnavailable, ReplyError):
                    self.receive_starts(pool, starts)
                    raise
        self._known[pool] = known

    async def _stored(self, pool: str) -> Snapshot | None:
        record = await self._control.learned(pool)
        if record is None:
            return None
        try:
            found = decode_learned(record, _decoder)
        except ValueError as error:
            log.warning("what is known of pool %s is learned anew, it cannot be read: %s", pool, error)
            return None
        if found is None:
            log.info("what is known of pool %s is learned anew, it is another version's", pool)
        return found

    async def _taught(self, pool: str, known: Snapshot, now_s: float) -> Snapshot:
        """With what telemetry tells, when it is time to ask and it can be asked; all of it or nothing."""
        if not self._url or abs(now_s - known.learned_s) <= _LEARN_EVERY_S:
            return known
        try:
            return await self._ask(pool, known, now_s)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # a TimeoutError is an OSError
            log.warning("of pool %s nothing can be learned: %s", pool, error or type(error).__name__)
            return known

    async def _ask(self, pool: str, known: Snapshot, now_s: float) -> Snapshot:
        """Raises aiohttp.ClientError, OSError or ValueError."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:

            async def rows(
                query: str, from_s: int, until_s: int, rows_max: int, answer: type[_Answer[Row]]
            ) -> list[Row]:
                given = {"pool": pool, "from_us": from_s * 1_000_000, "until_us": until_s * 1_000_000}
                body = {"query": query, "parameters": given, "rows_max": rows_max}
                return msgspec.json.decode(await self._post(session, _encoder.encode(body)), type=answer).rows

            now = int(now_s)
            arrived: list[ArrivalRow] = []
            for from_s in range(now - WEEKS * WEEK_S, now, _SPAN_S):
                until_s = min(from_s + _SPAN_S, now)
                arrived += await rows("arrivals", from_s, until_s, _SPAN_S // SLOT_S + 1, _Answer[ArrivalRow])
            if not arrived:  # nothing is known of the pool, or not any more
                return known
            lengths = await rows("lengths", now - _LENGTHS_S, now, _FEW_ROWS, _Answer[LengthsRow])
            decoded = await rows("speeds", now - _SPEEDS_S, now, _FEW_ROWS, _Answer[SpeedRow])
        return await asyncio.to_thread(taught, known, arrived, lengths, decoded, now_s)

    async def _post(self, session: aiohttp.ClientSession, body: bytes) -> bytes:
        headers = {"authorization": f"Bearer {self._token}"}
        async with session.post(f"{self._url}/query", data=body, headers=headers, allow_redirects=False) as answer:
            read = await answer.read()
            if answer.status != 200:
                raise ValueError(f"stream-gw telemetry answers {answer.status}: {read[:200].decode(errors='replace')}")
            return read


def taught(
    known: Snapshot,
    arrived: Sequence[ArrivalRow],
    lengths: Sequence[LengthsRow],
    decoded: Sequence[SpeedRow],
    now_s: float,
) -> Snapshot:
    """Raises ValueError on arrivals that cannot be. What has no row now keeps what it taught before."""
    found, prefill_per_s = speeds(decoded)
    return msgspec.structs.replace(
        known,
        learned_s=now_s,
        arrivals=learned(arrived, now_s),
        jumps=jumps(arrived, now_s),
        routes=routes(lengths) or known.routes,
        speeds=found or known.speeds,
        prefill_per_s=prefill_per_s or known.prefill_per_s,
    )
