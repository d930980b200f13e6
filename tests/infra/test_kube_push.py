"""Pools that real KEDA scales to what a real controller tells it by gRPC: the first replica as soon as somebody asks
for one, and nothing ended because the controller is."""

from __future__ import annotations

import asyncio
import base64
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.gateway.processes import Process
from tests.gateway.wire import DONE, Gate, chat, events, tokens_of_chunks
from tests.infra.chart import CHART, NAMESPACE, RELEASE, objects, of_kind, values
from tests.infra.test_kube import replicas, until
from tests.support.kube import Kube, need_kube
from tests.support.redis import RedisServer
from tests.support.server import free_port, wait_for
from tests.support.tls import Authority
from tests.support.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

POOL, STEADY = "llm-stream-gw-pool-qwen3-8b", "llm-stream-gw-pool-steady"
MODEL = "Qwen/Qwen3-8B"
POLL_S = 20
"""KEDA's own polling interval, seconds."""


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    need_kube()
    with Kube(sync_s=2, downscale_s=1) as kube:
        kube.node("gpu-0", **{"nvidia.com/gpu": "8"})
        kube.kubectl("create", "namespace", NAMESPACE)
        yield kube


class Stage:
    """A controller and a gateway on a Redis of their own, and the release that is scaled by them."""

    def __init__(self, kube: Kube, folder: Path, stack: ExitStack) -> None:
        self.kube, self._stack = kube, stack
        self._port = free_port()
        self.redis = stack.enter_context(RedisServer())
        self._authority = Authority(folder, "scaler")
        self._server = self._authority.issue("controllers", "subjectAltName=DNS:localhost")
        self._pools = folder / "pools.toml"
        (told,) = [
            one["data"]["pools.toml"]
            for one in of_kind(objects("push", *self.sets()), "ConfigMap")
            if "pools.toml" in one["data"]
        ]
        self._pools.write_text(told)
        for name, data in (
            ("stream-gw-redis", {"url": b"redis://nowhere"}),
            (
                "stream-gw-scaler-keda",
                {
                    "ca.crt": self._authority.ca.read_bytes(),
                    "tls.crt": self._authority.client.cert.read_bytes(),
                    "tls.key": self._authority.client.key.read_bytes(),
                },
            ),
        ):
            encoded = {key: base64.b64encode(text).decode() for key, text in data.items()}
            where = {"name": name, "namespace": NAMESPACE}
            kube.kubectl(
                "create", "-f", "-", given={"apiVersion": "v1", "kind": "Secret", "metadata": where, "data": encoded}
            )
        self.controller = self._controller()
        gateway = self._start("gateway", "--port", "0", "--dev-key", "k")
        self.gate = Gate(gateway.facts["url"], gateway.pid, "k")

    def sets(self, *more: str) -> list[str]:
        quick = "zero_s=1", "low_s=1", "cold_start_s=2", "warm_share=0"
        given = [
            f"autoscaling.push.address=localhost:{self._port}",
            f"autoscaling.prometheus={self.kube.prometheus_url}",
            f"autoscaling.pollingSeconds={POLL_S}",
            "autoscaling.cooldownSeconds=3",
            "autoscaling.failures=2",
            "autoscaling.down.periodSeconds=4",
            "autoscaling.down.stabilizationSeconds=0",
            "gateway.autoscaling.by=none",
            *(f"pools[0].plan.{one}" for one in quick),
            # Three are wanted of it, and KEDA may leave it one
            "pools[1].name=steady", "pools[1].model=steady", "pools[1].min=1", "pools[1].plan.warm_min=2",
            *more,
        ]  # fmt: skip
        return [word for one in given for word in ("--set", one)]

    def helm(self, verb: str, *more: str) -> None:
        self.kube.helm(verb, RELEASE, str(CHART), "-n", NAMESPACE, "-f", values("push"), *self.sets(*more))

    def _start(self, *flags: str) -> Process:
        env = {"STREAM_GW_REDIS_URL": self.redis.url, "STREAM_GW_PARTITIONS": "4"}
        return self._stack.enter_context(Process(*flags, **env))

    def _controller(self) -> Process:
        files = self._server.cert, self._server.key, self._authority.ca
        flags = zip(("--scaler-cert", "--scaler-key", "--scaler-client-ca"), map(str, files), strict=True)
        started = self._start(
            "controller", "--pools-file", str(self._pools), "--metrics-port", "0",
            "--scaler-host", "0.0.0.0", "--scaler-port", str(self._port), *(word for flag in flags for word in flag),
        )  # fmt: skip
        self.kube.scrape("controllers", [started.facts["metrics"]])
        return started

    def kill(self) -> None:
        self.controller.signal(signal.SIGKILL)
        self.controller.wait()

    def restart(self) -> None:
        self.controller = self._controller()

    def agent(self) -> Process:
        """In place of the pod's."""
        return self._start("agent", "--pool", "qwen3-8b", "--sim", f"model={MODEL},itl_ms=5,ttft_ms=20")

    def asked_of_the_scaler(self) -> float:
        """How often KEDA has asked the controller that runs now."""
        found = self.kube.query("sum(scaler_calls_total)")
        return float(found[0]["value"][1]) if found else 0.0

    def listening(self) -> float:
        """Pools of which KEDA is told by the controller that runs now."""
        found = self.kube.query("sum(scaler_streams)")
        return float(found[0]["value"][1]) if found else 0.0

    def is_so(self, name: str, condition: str) -> bool:
        scaled = self.kube.get("-n", NAMESPACE, "scaledobject", name)
        return "True" in {one["status"] for one in scaled["status"]["conditions"] if one["type"] == condition}

    def is_active(self) -> bool:
        """As KEDA has it: what is not is ended, where it may be empty."""
        return self.is_so(POOL, "Active")


@pytest.fixture
def stage(kube: Kube, tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(kube, tmp_path, stack)


@asynccontextmanager
async def waiting(gate: Gate) -> AsyncIterator[asyncio.Task[int]]:
    """A request at the pool, and how many tokens it got in the end."""

    async def ask() -> int:
        async with gate.create(chat(20, model=MODEL)) as exchange:
            assert exchange.status == 200, exchange.status
            *chunks, done = [one for one in events(await exchange.rest(300)) if one.data]
        assert done.data == DONE
        return tokens_of_chunks(chunk.json for chunk in chunks)

    asked = asyncio.create_task(ask())
    try:
        yield asked
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def first_replica(stage: Stage) -> float:
    """Seconds until there is one."""
    began = time.monotonic()
    await asyncio.to_thread(until, stage.kube, POOL, 1, 2 * POLL_S)
    return time.monotonic() - began


async def test_the_first_replica_comes_at_once_and_no_replica_goes_with_the_controller(stage: Stage) -> None:
    await asyncio.to_thread(stage.helm, "install")
    await asyncio.to_thread(until, stage.kube, STEADY, 3, 90)
    await asyncio.to_thread(until, stage.kube, POOL, 0, 90)

    async def listed() -> bool:
        return MODEL in [model["id"] for model in (await stage.gate.ask("GET", "/v1/models")).json["data"]]

    await eventually(listed, "the gateway to have read of it", 20)
    await asyncio.to_thread(wait_for, lambda: stage.listening() == 2, "KEDA to listen for both pools", 90)
    async with waiting(stage.gate) as asked:
        pushed_s = await first_replica(stage)
        await asyncio.to_thread(wait_for, stage.is_active, "KEDA to take it for active", 60)

        # The controller dies, KEDA asks nobody, again and again, for longer than it waits before it ends the last one
        await asyncio.to_thread(stage.helm, "upgrade", "autoscaling.pollingSeconds=1")
        await asyncio.to_thread(stage.kill)
        await asyncio.to_thread(wait_for, lambda: not stage.is_active(), "KEDA to take it for inactive", 60)
        seen = set()
        for _ in range(20):
            seen.add((await asyncio.to_thread(replicas, stage.kube, POOL), replicas(stage.kube, STEADY)))
            await asyncio.sleep(1)
        assert seen == {(1, 3)} and not stage.is_active()

        await asyncio.to_thread(stage.restart)
        await asyncio.to_thread(wait_for, stage.asked_of_the_scaler, "KEDA to ask the next", 60)
        agent = await asyncio.to_thread(stage.agent)
        assert await asked == 20, "it waited through all of it"
        await asyncio.to_thread(until, stage.kube, POOL, 0, 60)
        await asyncio.to_thread(agent.terminate)
        assert replicas(stage.kube, STEADY) == 3

    # A controller that cannot read the plans any more does not know, and says so: there are fallbackReplicas, or more
    stage.redis.freeze()
    try:
        await asyncio.to_thread(wait_for, lambda: stage.is_so(STEADY, "Fallback"), "the fallback", 60)
        await asyncio.to_thread(until, stage.kube, POOL, 2, 60)
        assert replicas(stage.kube, STEADY) == 3
    finally:
        stage.redis.thaw()
    await asyncio.to_thread(until, stage.kube, POOL, 0, 90)
    assert replicas(stage.kube, STEADY) == 3

    await asyncio.to_thread(stage.helm, "upgrade", "autoscaling.trigger=prometheus")
    await asyncio.sleep(2)  # KEDA has asked then, and asks again a whole interval later
    async with waiting(stage.gate) as asked:
        polled_s = await first_replica(stage)
        print(
            f"first replica {pushed_s:.1f} s after the request; asked by Prometheus every {POLL_S} s, {polled_s:.1f} s"
        )
        assert pushed_s < 3 < polled_s
        await asyncio.to_thread(stage.agent)
        assert await asked == 20
