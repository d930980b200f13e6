"""A platform of single processes on the real vLLM: Redis, controller, gateway, and one agent with its vLLM."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.chaos.fleet import PARTITIONS
from tests.gateway.processes import Process
from tests.gateway.wire import DONE, Gate
from tests.support.redis import RedisServer
from tests.vllm.continued import USAGE, chunks_of
from tests.vllm.real import GENERATION, KV_TOKENS, Direct, Home, server_below

PLATFORM_KV_TOKENS = 4 * KV_TOKENS


@dataclass(frozen=True)
class Platform:
    gate: Gate
    agent: Process
    redis_url: str

    @property
    def direct(self) -> Direct:
        return server_below(self.agent.pid)[1]

    @property
    def server(self) -> int:
        return server_below(self.agent.pid)[0]

    async def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        streamed = {**body, "stream": True, "stream_options": USAGE}
        reply = await self.gate.ask("POST", path, streamed)
        assert reply.status == 200, reply
        assert f"data: {DONE}\n".encode() in reply.body[-100:], reply.body[-500:]
        return chunks_of(reply.body)


@contextlib.contextmanager
def platform_on(home: Home) -> Iterator[Platform]:
    with contextlib.ExitStack() as stack:
        redis_url = stack.enter_context(RedisServer()).url
        env = {"STREAM_GW_REDIS_URL": redis_url, "STREAM_GW_PARTITIONS": str(PARTITIONS)}
        stack.enter_context(Process("controller", **env))
        flags = shlex.join((*GENERATION, "--kv-cache-memory-bytes", str(PLATFORM_KV_TOKENS * 512)))
        command = ["agent", "--engine", "vllm", "--model", home.model(), "--vllm-python", home.python, "--kv-events"]
        agent = stack.enter_context(Process(*command, STREAM_GW_VLLM_FLAGS=flags, **env))
        gateway = stack.enter_context(Process("gateway", "--port", "0", STREAM_GW_DEV_KEY="sk-dev", **env))
        yield Platform(Gate(gateway.facts["url"], gateway.pid, "sk-dev"), agent, redis_url)
