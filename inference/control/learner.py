"""Learns from the traces what usually arrives at each declared pool, and keeps it in Redis.

Telemetry may be away: what was learned stays, and only its age grows.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping

import aiohttp
import msgspec

from inference.control.profile import DAY_S, SLOT_S, WEEK_S, WEEKS, ArrivalProfile, learned
from stream_fabric.errors import FabricUnavailable
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.wire import ReplyError

log = logging.getLogger(__name__)

_LOAD_EVERY_S = 60.0
_LEARN_EVERY_S = 600.0
_TIMEOUT_S = 30.0
_SPAN_S = 6 * DAY_S
"""An answer has no more rows than these have slots."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ArrivalProfile)


class _Answer(msgspec.Struct):
    rows: list[tuple[float, float, float, float]]


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
        self._profiles: dict[str, ArrivalProfile] = {}

    @property
    def profiles(self) -> Mapping[str, ArrivalProfile]:
        return self._profiles

    async def run(self) -> None:
        while True:
            for pool in self._pools:
                try:
                    await self._tend(pool)
                except (FabricUnavailable, ReplyError) as error:
                    log.warning("what usually arrives at pool %s cannot be read: %s", pool, error)
                except (aiohttp.ClientError, OSError, ValueError) as error:  # a TimeoutError is an OSError
                    log.warning(
                        "what usually arrives at pool %s cannot be learned: %s", pool, error or type(error).__name__
                    )
            await asyncio.sleep(_LOAD_EVERY_S * random.uniform(0.9, 1.0))

    async def _tend(self, pool: str) -> None:
        record = await self._control.profile(pool)
        if record is not None:
            self._profiles[pool] = _decoder.decode(record)
        known = self._profiles.get(pool)
        now_s = time.time()
        if self._url and self._leads() and (known is None or now_s - known.learned_s > _LEARN_EVERY_S):
            rows = await self._ask(pool, now_s)
            if rows:
                self._profiles[pool] = profile = await asyncio.to_thread(learned, rows, now_s)
                await self._control.put_profile(pool, _encoder.encode(profile))

    async def _ask(self, pool: str, now_s: float) -> list[tuple[float, float, float, float]]:
        """Raises aiohttp.ClientError, OSError or ValueError."""
        until_s = int(now_s)
        rows = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
            for from_s in range(until_s - WEEKS * WEEK_S, until_s, _SPAN_S):
                rows += await self._ask_span(session, pool, from_s, min(from_s + _SPAN_S, until_s))
        return rows

    async def _ask_span(
        self, session: aiohttp.ClientSession, pool: str, from_s: int, until_s: int
    ) -> list[tuple[float, float, float, float]]:
        parameters = {"pool": pool, "from_us": from_s * 1_000_000, "until_us": until_s * 1_000_000}
        body = {"query": "arrivals", "parameters": parameters, "rows_max": _SPAN_S // SLOT_S + 1}
        async with session.post(
            f"{self._url}/query",
            data=_encoder.encode(body),
            headers={"authorization": f"Bearer {self._token}"},
            allow_redirects=False,
        ) as answer:
            read = await answer.read()
            if answer.status != 200:
                raise ValueError(f"stream-gw telemetry answers {answer.status}: {read[:200].decode(errors='replace')}")
            return msgspec.json.decode(read, type=_Answer).rows
