"""Agents in the test's process, wired as ``inference.agent.main`` wires them."""

from __future__ import annotations

from inference.agent.agent import Agent
from inference.agent.main import redis_ports
from inference.agent.replica import AgentPolicy
from stream_fabric.events import NoEvents
from stream_fabric.ports import Clock, Engine, EventSink
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.stream.ids import new_replica_id


def make_agent(
    policy: AgentPolicy,
    engine: Engine,
    client: RedisClient,
    partitions: Partitions,
    events: EventSink | None = None,
    clock: Clock | None = None,
    name: str = "r",
) -> Agent:
    """An agent of a new replica on Redis. Without ``clock`` it reads the host's."""
    clock = clock or HostClock()
    replica = new_replica_id(name, clock.now_us() // 1_000_000, HostRandom().token_hex(3))
    ports = redis_ports(client, partitions, policy.lease.pool, replica, clock, events or NoEvents())
    return Agent(policy, replica, engine, ports)
