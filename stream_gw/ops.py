"""``GET /v1/admin/ops``: what an operator watches live, as server-sent events. Beside the token path.

While somebody watches, a snapshot of everything is made every two seconds: read once, encoded once, the same bytes to
all. Each is whole, so a viewer that is behind gets the newest and no queue grows, and one that comes back may come back
to another gateway. Redis and telemetry are asked in tasks of their own: while one does not answer, its last figures are
shown with what is wrong and how old they are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from stream_fabric.errors import Draining, StreamGwError, TooMany, Unauthenticated
from stream_fabric.ids import ReplicaId
from stream_fabric.limits import (
    OPS_EVERY_S,
    OPS_HISTORY_S,
    OPS_HISTORY_WAIT_S_MAX,
    OPS_POOLS_MAX,
    OPS_REPLICAS_MAX,
    OPS_VIEWERS_MAX,
    OPS_WAIT_S_MAX,
)
from stream_fabric.metrics import TTFT_BUCKETS_S
from stream_fabric.placement import TIERS
from stream_fabric.plans import PoolPlan
from stream_fabric.redis.pool import Held, Line, RedisPools, ReplicaInfo
from stream_fabric.redis.wire import ReplyError
from stream_gw import recent
from stream_gw.admin import Traces
from stream_gw.auth import Principal
from stream_gw.dialects.errors import error_body
from stream_gw.server import EdgeHttp
from stream_gw.sse import SseBody, chunk

log = logging.getLogger(__name__)

_HISTORY_SINCE = "15m"
_AT_ONCE = 16
_ROWS_A_TURN = 100
"""Of replicas looked at before tokens go first again."""

_T = TypeVar("_T")

# --- what is shown ---------------------------------------------------------------------------------------------


class Replica(msgspec.Struct, frozen=True, gc=False):
    replica: str
    state: str
    """As its agent says; ``lost``: its lease has ended; ``new``: nothing is known of it yet."""
    lease_left_s: float
    in_flight: int
    """Streams that it runs or that are on their way to it, of ``room``."""
    room: int = 0
    running: int = 0
    """Sequences in the engine, of ``slots``."""
    slots: int = 0
    waiting: int = 0
    """In the engine, for a slot."""
    tokens_per_s: float = 0.0
    load_ms: float = 0.0
    queue_p99_ms: float = 0.0
    kv_used: float | None = None
    """Share; None: the engine does not tell."""
    prefix_hits: float | None = None
    """Share of the prompt tokens it has been asked for."""
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    """Of the models, those that are LoRA adapters."""
    engine: str = ""
    hardware: str = ""
    region: str = ""
    revision: str = ""
    simulated: bool = False


class Tier(msgspec.Struct, frozen=True, gc=False):
    tier: str
    waiting: int
    oldest_s: float


class Plan(msgspec.Struct, frozen=True):
    """What the leading controller wants of a declared pool, and why."""

    ready: int
    warm: int
    pods: int
    reason: str
    at_ms: int


class Pool(msgspec.Struct, frozen=True):
    pool: str
    plan: Plan | None
    """None: nobody plans it."""
    states: dict[str, int]
    """How many replicas there are in each state."""
    slots: int
    """Of those that are ready."""
    asked: int
    """Sequences that run or wait, in engines and in line."""
    tokens_per_s: float
    ttft_p50_ms: float | None
    """Of the last minute, from placement to first token, as its replicas tell; of requests of tier batch nothing."""
    ttft_p99_ms: float | None
    tiers: list[Tier]
    replicas: list[Replica]
    """Not all of a large pool: those in trouble first."""


class Fleet(msgspec.Struct, frozen=True):
    pools: list[Pool]
    pools_all: int


class Minutes(msgspec.Struct, frozen=True, gc=False):
    """A row of the saved query ``pulse``: of one minute, or where that is 0 of one pool in all of them."""

    minute_us: int
    pool: str
    requests: int
    failed: int
    refused: int
    tokens: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    ttft_p99_ms: float | None


class Itself(msgspec.Struct, frozen=True):
    name: str
    region: str
    open_streams: int
    open_sockets: int
    lagging: int
    viewers: int


class Source(msgspec.Struct, frozen=True):
    """How it stands with one that is asked."""

    state: Literal["off", "ok", "away"]
    age_s: float
    """Of what is shown of it."""
    message: str


class Snapshot(msgspec.Struct, frozen=True):
    at_ms: int
    every_s: float
    gateway: Itself
    here: recent.Told
    fabric: Source
    fleet: Fleet | None
    telemetry: Source
    history: list[Minutes] | None


_encoder = msgspec.json.Encoder()
_minutes = msgspec.json.Decoder(list[Minutes])

# --- who looks -------------------------------------------------------------------------------------------------


class Viewer(SseBody):
    """One who watches. Holds at most the newest snapshot, which all share, beside what its socket has not taken."""

    __slots__ = ("_expires_at", "_newest", "_request_id")

    def __init__(self, connection: EdgeHttp, who: Principal, request_id: str) -> None:
        self._expires_at = who.expires_at
        self._newest: bytes | None = None
        self._request_id = request_id
        super().__init__(connection)

    def open(self, *, retry: bool) -> None:
        super().open(retry=retry)
        if not self.full:
            self.drained()

    def show(self, piece: bytes) -> None:
        if self.done.done():
            return
        if self._early is not None or self.full:
            self._newest = piece
        elif not self._connection.transport.is_closing():
            self._silent = False
            self._write(piece)

    def drained(self) -> None:
        piece, self._newest = self._newest, None
        if piece is not None:
            self.show(piece)

    def expire(self, unix_now: float) -> None:
        if self._expires_at is not None and self._expires_at <= unix_now:
            self.fail(Unauthenticated("the capability token has expired; mint another"))

    def fail(self, error: StreamGwError) -> None:
        if not self.done.done():
            self._newest = None
            self._put(b"data: " + error_body(error, self._request_id) + b"\n\n")
            self._end()


class Known(Protocol):
    """What the gateway believes of the fleet anyway."""

    @property
    def by_pool(self) -> Mapping[str, Sequence[ReplicaInfo]]: ...

    @property
    def plans(self) -> Mapping[str, PoolPlan]: ...


class Asked(Generic[_T]):
    """What is asked again and again and may take long: one question at a time, in a task of its own."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, _T]], now: Callable[[], float]) -> None:
        self._ask = ask
        self._now = now
        self._task: asyncio.Task[None] | None = None
        self.value: _T | None = None
        self.asked_at = float("-inf")
        self._answered_at = now()
        self._error = ""

    async def again(self, wait_s: float) -> None:
        """Ask, unless an answer is still awaited, and wait for it so long."""
        if self._task is None or self._task.done():
            self.asked_at = self._now()
            self._task = asyncio.create_task(self._answer())
        done, _ = await asyncio.wait([self._task], timeout=wait_s)
        for task in done:
            task.result()

    async def _answer(self) -> None:
        try:
            self.value = await self._ask()
        except (StreamGwError, ReplyError, msgspec.MsgspecError) as error:
            self._error = str(error)
        else:
            self._answered_at, self._error = self._now(), ""

    def source(self, late_s: float) -> Source:
        """``late_s``: an answer that takes longer does not come."""
        age_s = self._now() - self._answered_at
        late = self._task is not None and not self._task.done() and self._now() - self.asked_at >= late_s
        message = f"no answer within {late_s:g} s" if late else self._error
        return Source("away" if message else "ok", round(age_s, 1), message)

    def forget(self) -> None:
        """Nobody looks any more: what it was is of no use."""
        self.value = None
        self.asked_at = float("-inf")
        self._answered_at, self._error = self._now(), ""


class Ops:
    """The feed of one gateway."""

    def __init__(
        self,
        pools: RedisPools,
        known: Known,
        traces: Traces,
        gateway: Callable[[int], Itself],
        here: Callable[[], recent.Told],
        now: Callable[[], float],
    ) -> None:
        """``gateway``: itself, when so many watch."""
        self._pools = pools
        self._known = known
        self._traces = traces
        self._gateway = gateway
        self._here = here
        self._now = now
        self._fleet = Asked(self._read_fleet, now)
        self._history = Asked(self._read_history, now)
        self.viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._newest: tuple[float, bytes] | None = None
        self._draining = False

    def check(self) -> None:
        """Whether one more may watch. Raises TooMany or Draining."""
        if self._draining:
            raise Draining("this gateway is going away; ask again", retry_after_s=1)
        if len(self.viewers) >= OPS_VIEWERS_MAX:
            raise TooMany(f"{OPS_VIEWERS_MAX} watch here already, as many as may; close a page", retry_after_s=5)

    def watch(self, viewer: Viewer) -> None:
        """Raises TooMany or Draining."""
        self.check()
        self.viewers.add(viewer)
        if self._newest is not None and self._now() - self._newest[0] < 2 * OPS_EVERY_S:
            viewer.show(self._newest[1])
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._ended)

    def leave(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)
        if not self.viewers:
            self._newest = None
            self._fleet.forget()
            self._history.forget()

    def send_on(self) -> None:
        """The gateway drains: who watches goes elsewhere. They are few, so all at once."""
        self._draining = True
        for viewer in tuple(self.viewers):
            viewer.fail(Draining("this gateway is going away; watch elsewhere"))

    async def _run(self) -> None:
        """While anybody watches. A task of its own: a fault of ours ends the feed, and nothing else."""
        while self.viewers:
            piece = await self.piece()
            self._newest = (self._now(), piece)
            for viewer in tuple(self.viewers):
                viewer.expire(time.time())
                viewer.show(piece)
            await asyncio.sleep(OPS_EVERY_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("the operations feed failed", exc_info=error)
        for viewer in tuple(self.viewers):
            viewer.fail(StreamGwError("the feed failed; the gateway's log says why"))

    async def piece(self) -> bytes:
        """A snapshot as it goes over the wire."""
        if self._traces.known and self._now() - self._history.asked_at >= OPS_HISTORY_S:
            await self._history.again(0.0)
        await self._fleet.again(OPS_WAIT_S_MAX)
        at_ms = time.time_ns() // 1_000_000
        off = Source("off", 0.0, "")
        snapshot = Snapshot(
            at_ms,
            OPS_EVERY_S,
            self._gateway(len(self.viewers)),
            self._here(),
            self._fleet.source(OPS_WAIT_S_MAX),
            self._fleet.value,
            self._history.source(OPS_HISTORY_WAIT_S_MAX) if self._traces.known else off,
            self._history.value,
        )
        return chunk(b"id: %d\ndata: %b\n\n" % (at_ms, _encoder.encode(snapshot)))

    # --- what is read --------------------------------------------------------------------------------------

    async def _read_history(self) -> list[Minutes]:
        return _minutes.decode(await self._traces.query("pulse", _HISTORY_SINCE, OPS_HISTORY_WAIT_S_MAX))

    async def _read_fleet(self) -> Fleet:
        known, plans = self._known.by_pool, self._known.plans
        names = sorted(
            {*await self._pools.pools(), *plans},
            key=lambda name: (any(info.state == "ready" for info in known.get(name, ())), name),
        )
        busy = asyncio.Semaphore(_AT_ONCE)

        async def read(name: str) -> tuple[str, list[Held], list[Line]]:
            async with busy:
                return name, *await asyncio.gather(self._pools.seats(name), self._pools.lines(name))

        pools = []
        left = OPS_REPLICAS_MAX
        for name, seats, lines in await asyncio.gather(*map(read, names[:OPS_POOLS_MAX])):
            infos = {info.replica: info for info in known.get(name, ())}
            rows: list[Replica] = []
            for start in range(0, len(seats), _ROWS_A_TURN):
                rows += _rows(seats[start : start + _ROWS_A_TURN], infos)
                await asyncio.sleep(0)
            pools.append(_pool(name, rows, lines, plans.get(name), _first_tokens(infos.values()), left))
            left -= len(pools[-1].replicas)
        return Fleet(sorted(pools, key=attrgetter("pool")), len(names))


def _rows(seats: Sequence[Held], infos: Mapping[ReplicaId, ReplicaInfo]) -> Iterator[Replica]:
    for held in seats:
        info = infos.get(held.replica)
        if info is None:
            yield Replica(held.replica, "lost" if held.left_s < 0 else "new", round(held.left_s, 1), held.in_flight)
            continue
        load = info.load
        asked = load.prefix_queries_tokens
        yield Replica(
            held.replica,
            "lost" if held.left_s < 0 else info.state,
            round(held.left_s, 1),
            held.in_flight,
            info.room,
            load.running,
            load.slots,
            load.waiting,
            round(info.tokens_per_s, 1),
            round(info.prefill_ms + info.decode_ms, 1),
            round(info.queue_p99_ms, 1),
            round(load.kv_used_ratio, 4) if load.kv_capacity_tokens or load.kv_used_ratio else None,
            round(load.prefix_hits_tokens / asked, 4) if asked else None,
            info.models,
            info.adapters,
            info.engine,
            info.hardware,
            info.region,
            info.revision,
            info.simulated,
        )


def _first_tokens(infos: Iterable[ReplicaInfo]) -> list[int]:
    """How many came in each bucket of ``TTFT_BUCKETS_S``, and above them."""
    counts = [0] * (len(TTFT_BUCKETS_S) + 1)
    for info in infos:
        for index, count in enumerate(info.ttft_counts[: len(counts)]):
            counts[index] += count
    return counts


def _quantile_ms(counts: Sequence[int], share: float) -> float | None:
    """As if those of a bucket lay evenly in it; above the last bound, that bound. None: there were none."""
    wanted, seen = share * sum(counts), 0
    bounds = (0.0, *TTFT_BUCKETS_S, TTFT_BUCKETS_S[-1])
    for count, (low, high) in zip(counts, pairwise(bounds), strict=True):
        if count and seen + count >= wanted:
            return round(1000 * (low + (high - low) * (wanted - seen) / count), 1)
        seen += count
    return None


def _pool(
    name: str,
    rows: list[Replica],
    lines: Sequence[Line],
    plan: PoolPlan | None,
    first_tokens: Sequence[int],
    most: int,
) -> Pool:
    states: dict[str, int] = {}
    for row in rows:
        states[row.state] = states.get(row.state, 0) + 1
    shown = sorted(rows, key=lambda row: row.state == "ready")[:most]  # what is well can be left out
    return Pool(
        name,
        None if plan is None else Plan(plan.ready, plan.warm, plan.pods, plan.reason, plan.at_us // 1000),
        states,
        sum(row.slots for row in rows if row.state == "ready"),
        sum(row.running + row.waiting for row in rows) + sum(line.depth for line in lines),
        round(sum(row.tokens_per_s for row in rows), 1),
        _quantile_ms(first_tokens, 0.5),
        _quantile_ms(first_tokens, 0.99),
        [Tier(tier, line.depth, round(line.oldest_s, 1)) for tier, line in zip(TIERS, lines, strict=True)],
        sorted(shown, key=attrgetter("replica")),
    )
