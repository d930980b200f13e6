"""Learns the traffic model of each declared pool, from telemetry and from observed cold starts, and keeps it in Redis.

While telemetry is unreachable the models stay, and only their age grows. When Redis loses them, the leader writes back
what it knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar

import aiohttp
import msgspec

from inference.control.policy.arrival_profile import DAY_S, SLOT_S, WEEK_S, WEEKS
from inference.control.policy.traffic_model import ArrivalRow, LengthsRow, PoolTrafficModel, SpeedRow, update_model
from stream_fabric.errors import FabricError
from stream_fabric.pool.traffic_model import append_cold_starts, decode_traffic_model
from stream_fabric.ports import Clock, Control, Random
from stream_fabric.process.http_client import HTTP_ERRORS, open_session, read_body

log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
_ANSWER_BYTES_MAX = 8 << 20
_ERROR_CHARS_MAX = 200
_SPAN_S = 6 * DAY_S
"""Span of one query for arrivals. An answer has at most one row for each slot in it."""
_FEW_ROWS = 100
_LENGTHS_S = 3 * DAY_S
_SPEEDS_S = WEEK_S

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(PoolTrafficModel)
Row = TypeVar("Row")


class _Answer(msgspec.Struct, Generic[Row]):
    rows: list[Row]


class TrafficModelJob:
    """Runs in every controller: the leader learns and writes, the others read.

    ``url``: of stream-gw telemetry; empty: only cold starts are learned. ``load_every_s``: seconds between two looks at
    Redis. ``learn_every_s``: seconds between two queries to telemetry.
    """

    def __init__(
        self,
        url: str,
        token: str,
        pools: Collection[str],
        control: Control,
        clock: Clock,
        random: Random,
        *,
        load_every_s: float = 60.0,
        learn_every_s: float = 600.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._pools = pools
        self._control = control
        self._clock = clock
        self._random = random
        self._load_every_s = load_every_s
        self._learn_every_s = learn_every_s
        self.is_leading = False
        """Set by the leader of this process at each change of leadership."""
        self._models: dict[str, PoolTrafficModel] = {}
        self._new_starts_s: dict[str, list[float]] = {}
        """Cold starts that are not in Redis yet."""

    @property
    def known(self) -> Mapping[str, PoolTrafficModel]:
        """Traffic models by pool."""
        return self._models

    def receive_starts(self, pool: str, durations_s: Sequence[float]) -> None:
        """Take cold starts that this controller observed."""
        self._new_starts_s.setdefault(pool, []).extend(durations_s)

    async def run(self) -> None:
        while True:
            for pool in self._pools:
                try:
                    await self._update(pool)
                except FabricError as error:
                    log.warning("traffic model not read or written, retrying: pool=%s error=%s", pool, error)
            await asyncio.sleep(self._load_every_s * self._random.uniform(0.9, 1.0))

    async def _update(self, pool: str) -> None:
        """Load the model from Redis, or keep the known one; the leader adds what it learned and writes it back."""
        stored = await self._read_stored(pool)
        model = stored or self._models.get(pool) or PoolTrafficModel()
        starts = self._new_starts_s.pop(pool, [])
        if self.is_leading:
            model = msgspec.structs.replace(model, starts_s=append_cold_starts(model.starts_s, starts))
            model = await self._learned(pool, model, self._clock.now_us() / 1e6)
            if model != (stored or PoolTrafficModel()):
                try:
                    await self._control.put_learned(pool, _encoder.encode(model))
                except FabricError:
                    self.receive_starts(pool, starts)
                    raise
        self._models[pool] = model

    async def _read_stored(self, pool: str) -> PoolTrafficModel | None:
        record = await self._control.learned(pool)
        if record is None:
            return None
        try:
            model = decode_traffic_model(record, _decoder)
        except ValueError as error:
            log.warning("traffic model is invalid and learned anew: pool=%s error=%s", pool, error)
            return None
        if model is None:
            log.info("traffic model is of another version and learned anew: pool=%s", pool)
        return model

    async def _learned(self, pool: str, model: PoolTrafficModel, now_s: float) -> PoolTrafficModel:
        """Return the model after new answers of telemetry; unchanged if it is not time or a query failed."""
        if not self._url or abs(now_s - model.learned_s) <= self._learn_every_s:
            return model
        try:
            return await self._query(pool, model, now_s)
        except HTTP_ERRORS as error:
            log.warning("traffic model not updated: pool=%s error=%s", pool, error or type(error).__name__)
            return model

    async def _query(self, pool: str, model: PoolTrafficModel, now_s: float) -> PoolTrafficModel:
        """Query telemetry and return the updated model. Raises one of ``HTTP_ERRORS``."""
        headers = {"authorization": f"Bearer {self._token}"}
        async with open_session(total_s=_TIMEOUT_S, headers=headers) as session:

            async def rows(
                query: str, from_s: int, until_s: int, rows_max: int, answer: type[_Answer[Row]]
            ) -> list[Row]:
                parameters = {"pool": pool, "from_us": from_s * 1_000_000, "until_us": until_s * 1_000_000}
                body = {"query": query, "parameters": parameters, "rows_max": rows_max}
                return msgspec.json.decode(await self._post(session, _encoder.encode(body)), type=answer).rows

            now = int(now_s)
            arrivals: list[ArrivalRow] = []
            for from_s in range(now - WEEKS * WEEK_S, now, _SPAN_S):
                until_s = min(from_s + _SPAN_S, now)
                arrivals += await rows("arrivals", from_s, until_s, _SPAN_S // SLOT_S + 1, _Answer[ArrivalRow])
            if not arrivals:  # telemetry does not know the pool yet, or no longer
                return model
            lengths = await rows("lengths", now - _LENGTHS_S, now, _FEW_ROWS, _Answer[LengthsRow])
            attempts = await rows("speeds", now - _SPEEDS_S, now, _FEW_ROWS, _Answer[SpeedRow])
        return await asyncio.to_thread(update_model, model, arrivals, lengths, attempts, now_s)

    async def _post(self, session: aiohttp.ClientSession, body: bytes) -> bytes:
        async with session.post(f"{self._url}/query", data=body, allow_redirects=False) as response:
            answer = await read_body(response, _ANSWER_BYTES_MAX)
            if response.status != 200:
                text = answer[:_ERROR_CHARS_MAX].decode(errors="replace")
                raise ValueError(f"stream-gw telemetry answered {response.status}: {text}")
            return answer
