"""The state that all parts of the agent share: its policy, its ports, and the state of the replica.

Nothing here has effects: the parts read ``ReplicaStatus`` and wait for its events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from inference.agent.observe.bill_guard import BillGuard
from inference.agent.observe.replica_events import ReplicaEvents
from inference.agent.structured.checker import Checker
from stream_fabric.accounts.ports import Accounts, Unbilled
from stream_fabric.errors import EngineLost
from stream_fabric.events import InputTimes
from stream_fabric.limits import FLUSH_FLOOR_S
from stream_fabric.moderation.moderator import Moderator
from stream_fabric.pool.placement import ReplicaState
from stream_fabric.ports import (
    Clock,
    Engine,
    EventSink,
    Inbox,
    Pools,
    Random,
    SleepLevel,
    StreamLog,
    Subscribe,
)


class LeasePolicy(msgspec.Struct, frozen=True):
    """The constant part of what a replica reports to its pool."""

    pool: str
    """Pool that it reports to; a cell, if the pool is divided."""
    engine: str
    models: tuple[str, ...]
    """Names of its models; those of adapters, which come and go, are the engine's to tell."""
    simulated: bool
    ttl_s: float
    room_ratio: float
    region: str = ""
    hardware: str = ""
    revision: str = ""
    gpu_hour_micro: int = 0
    """Price of one hour of the replica's GPUs in micro-units, for its attempts' events; 0: none."""


class AgentPolicy(msgspec.Struct, frozen=True):
    lease: LeasePolicy
    lease_renew_s: float
    drain_s: float
    standby: bool = False
    """Join the pool warm: take requests only after an operator or a controller has activated the replica."""
    trace_tokens_one_in: int = 0
    """Record the time of each token for 1 in N attempts; 0: for none."""
    flush_floor_s: float = FLUSH_FLOOR_S
    """Minimum time between two flushes; see ``Pump``."""
    moderation_window_chars: int = 200
    """Characters of an answer in one question to the moderation endpoint."""


@dataclass(frozen=True, slots=True)
class AgentPorts:
    """Everything outside the agent that it talks to, except its engine."""

    log: StreamLog
    pools: Pools
    inbox: Inbox
    subscribe: Subscribe
    clock: Clock
    random: Random
    events: EventSink
    unbilled: Unbilled
    accounts: Accounts | None = None
    """Where streams with budgets ask for more output tokens; None: they end at their first grant."""
    bills: BillGuard | None = None
    """None: requests are taken whatever becomes of their bills."""
    moderator: Moderator | None = None
    """Checks answers of plans with moderation; None: they fail."""
    checker: Checker | None = None
    """Checks replies against the JSON schemas of their requests; None: nothing is checked."""
    on_input: Callable[[InputTimes], None] = lambda times: None
    """Called with each input of a running stream that was applied or refused."""


class ReplicaStatus:
    """State of the replica: what it was asked to be, how far its engine is, and whether it leaves."""

    def __init__(self, engine: Engine, events: ReplicaEvents, *, standby: bool, bills: BillGuard | None = None) -> None:
        self._engine = engine
        self.bills = bills
        self._events = events
        self.started = False
        """True once the agent hears its doorbell: from then on it can take requests."""
        self.active = not standby
        self.draining = asyncio.Event()
        self.hurried = asyncio.Event()
        """Set when running streams no longer get their grace period."""
        self.failure: EngineLost | None = None
        """The reason why the engine serves no more."""
        self.sleep_level: SleepLevel | None = None
        """The level at which the engine should sleep; None: it should be awake."""
        self.sleep_level_changes = 0
        self.sleep_transition: ReplicaState | None = None
        """State shown while the engine falls asleep or wakes."""
        self.sleep_refused = ""
        """The reason why the engine does not sleep although it should; it is not tried a second time."""
        self.wake_s = 0.0
        """Duration of the engine's last wake."""
        self.yield_to = 0
        """Queued requests of higher tiers that batch streams yield to, by the pool's last reply that asked for it."""
        self.yield_check = asyncio.Event()
        """Set when batch streams may have to yield."""
        self.sleep_check = asyncio.Event()
        """Set when the engine's sleep may have to change."""

    @property
    def state(self) -> ReplicaState:
        if not self.started:
            return "starting"
        if self.draining.is_set():
            return "draining"
        if self.asleep is not None:
            return self.asleep
        if not self._engine.load().ready:
            return "warming"
        return "ready" if self.active else "warm"

    @property
    def asleep(self) -> ReplicaState | None:
        """State while the engine sleeps (``sleeping``) or wakes (``warming``); None: the engine is awake."""
        return self.sleep_transition or ("sleeping" if self._engine.load().asleep else None)

    def request_yield(self, waiting: int) -> None:
        """Make batch streams yield to ``waiting`` queued requests of higher tiers, and to those that run already."""
        self.yield_to = waiting
        self.yield_check.set()

    def drain(self, asked_by: str, reason: str = "") -> None:
        """Begin to drain the replica; later calls change nothing."""
        if not self.draining.is_set():
            self._events.receive_state_request("draining", asked_by, reason)
            self.draining.set()

    def fail(self, error: EngineLost) -> None:
        """Drain the replica because its engine no longer serves. The first error ends the process."""
        self.failure = self.failure or error
        self.drain("", "its engine failed")

    def request(self, desired: str, asked_by: str) -> bool:
        """Take a state that the pool asked for. True: the state changes, and the pool should get a report."""
        level: SleepLevel | None = None
        state: ReplicaState
        match desired:
            case "draining":
                self.drain(asked_by)
                return False
            case "warm" | "ready":
                state = "warm" if desired == "warm" else "ready"
            case "sleeping:1" | "sleeping:2":
                state, level = "sleeping", 1 if desired == "sleeping:1" else 2
            case _:  # a state that only a newer controller knows
                return False
        if (state == "ready", level) == (self.active, self.sleep_level):
            return False
        self._events.receive_state_request(state, asked_by)
        self.active = state == "ready"  # running streams continue, no new ones are placed
        self.request_sleep(level)
        return True

    def request_sleep(self, level: SleepLevel | None) -> None:
        """Set the level at which the engine should sleep. None: the engine should be awake."""
        if level != self.sleep_level:
            self.sleep_level = level
            self.sleep_level_changes += 1
        self.sleep_check.set()
