"""Five times the requests within seconds, on a real control plane with real agents whose pods take a minute to start:
what each client is told, second by second.

    python -m bench.surge [--json FILE] [--plot docs/surge.svg]
    python -m bench.surge --of FILE [--plot docs/surge.svg]

The chart runs on Kubernetes' own control plane with KEDA and Prometheus (``make kube``): two gateways, two controllers,
a pool of simulated replicas, one process a pod. A pod's process begins only after ``--pull`` seconds, as if its image
and its model had to be read, so a replica takes requests about a minute after it is wanted. Requests are an open loop:
they come at random moments around an even rate, whatever becomes of those before. Nobody announces the step: there is
no schedule, no telemetry and no profile. A client that is refused comes again after ``Retry-After`` seconds, at most
twice, as OpenAI's clients do. Second 0 is the first second of the step.

``--of`` reports again about the JSON of an earlier run. Exit code 1: an admitted request failed, a refusal named no
``Retry-After``, the run took nearly all of the machine, or its requests left late. 2: the control plane is not built.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from bench.harness import cpu_s
from bench.surge_plot import draw
from bench.surge_report import Pod, Run, Second, Try, faults_of, report
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.pools import RedisPools
from tests.infra.cluster import Cluster, cluster, pool
from tests.support.kube import HOME, missing_programs
from tests.support.kubelet import Pod as KubePod

POOL = "chat"
ANSWER_S = 120.0
"""After so long without its end a request has failed."""
SETTLE_S = 240.0
_CONTENT = re.compile(rb'"content":"(?!")')


# --- what is asked -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """When how many requests come. Times are in seconds from the step."""

    rate: float
    factor: float
    ramp_s: float
    before_s: float
    step_s: float
    after_s: float
    seed: int

    def rate_at(self, at_s: float) -> float:
        if not 0 <= at_s < self.step_s:
            return self.rate
        return self.rate * (1 + (self.factor - 1) * min(at_s / self.ramp_s, 1.0))

    def moments(self) -> Iterator[float]:
        """Moments of the requests: a Poisson process of this rate."""
        chance, most = random.Random(self.seed), self.rate * self.factor
        at_s = -self.before_s
        while (at_s := at_s + chance.expovariate(most)) < self.step_s + self.after_s:
            if chance.random() * most < self.rate_at(at_s):
                yield at_s


def body(number: int, seed: int) -> dict[str, object]:
    """A request whose prompt is like no other; nobody says how long its answer gets."""
    tokens = min(int(random.Random(f"{seed} {number}").lognormvariate(5.7, 0.6)), 1500)
    content = f"{seed} {number} " + "tok " * tokens
    return {"model": POOL, "messages": [{"role": "user", "content": content}], "stream": True}


class Load:
    """Clients of two gateways. Each is told something for every try."""

    def __init__(self, plan: Plan, urls: Sequence[str], session: aiohttp.ClientSession, retries: int) -> None:
        self._plan, self._urls, self._session, self._retries = plan, urls, session, retries
        self._turn = itertools.count()
        self.tries: list[Try] = []
        self.late_s: list[float] = []
        self.step_at = time.monotonic() + plan.before_s

    def now_s(self) -> float:
        return time.monotonic() - self.step_at

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, at_s in enumerate(self._plan.moments()):
                await asyncio.sleep(at_s - self.now_s())
                self.late_s.append(self.now_s() - at_s)
                tasks.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        for retry in range(self._retries + 1):
            asked = Try(number, retry, self.now_s())
            self.tries.append(asked)
            await self._ask(asked)
            if asked.told != "refused":
                return
            await asyncio.sleep(asked.retry_after_s)

    async def _ask(self, asked: Try) -> None:
        url = self._urls[next(self._turn) % len(self._urls)]
        try:
            content = body(asked.client, self._plan.seed)
            headers = {"x-stainless-retry-count": str(asked.retry)}
            async with self._session.post(f"{url}/v1/chat/completions", json=content, headers=headers) as answer:
                asked.status = answer.status
                if answer.status == 200:
                    await self._read(asked, answer)
                    return
                asked.said = (await answer.text())[:500]
                asked.told_s = self.now_s()
                asked.told = "refused" if answer.status in (429, 503) else "failed"
                asked.retry_after_s = int(answer.headers.get("retry-after", 0))
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            asked.told, asked.said = "failed", repr(error)
            asked.told_s = asked.told_s or self.now_s()

    async def _read(self, asked: Try, answer: aiohttp.ClientResponse) -> None:
        is_whole = False
        async for line in answer.content:
            if line.startswith(b": queued"):
                asked.queued.append((self.now_s(), line.decode().strip()))
            elif asked.told == "" and _CONTENT.search(line):
                asked.told, asked.told_s = "token", self.now_s()
            elif line.startswith(b"data: [DONE]"):
                is_whole = True
            elif line.startswith(b'data: {"error"'):
                asked.said = line.decode()[:500]
        asked.ended_s = self.now_s()
        if not is_whole or asked.told != "token":
            asked.told, asked.said = "failed", asked.said or "the response ended early"
            asked.told_s = asked.told_s or asked.ended_s


# --- what is seen ------------------------------------------------------------------------------------------------


def machine_s() -> tuple[float, float]:
    """Return the CPU seconds of all cores so far: those that were used, and those that the host took away."""
    ticks = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    user, nice, system, _, _, irq, softirq, steal = (tick / os.sysconf("SC_CLK_TCK") for tick in ticks)
    return user + nice + system + irq + softirq, steal


def own_s(pid: int) -> float:
    """Return the CPU seconds of a process and of all below it: here of the load, the platform and the control plane."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        return cpu_s(pid) + sum(map(own_s, children))
    except OSError:  # it has ended meanwhile
        return 0.0


class Watch:
    """Reads once a second what the controllers want and what there is."""

    def __init__(self, running: Cluster, client: RedisClient) -> None:
        self._running = running
        self._control, self._pools = RedisControl(client), RedisPools(client)
        self.seconds: list[Second] = []

    async def look(self, step_at: float) -> Second | None:
        """Return None while the pool has no plan."""
        plan = (await self._control.plans()).get(POOL)
        states = [info.state for info in await self._pools.replicas(POOL)]
        replicas = await asyncio.to_thread(self._running.replicas)
        used_s, stolen_s = machine_s()
        if plan is None:
            return None
        wall = time.time() - time.monotonic() + step_at
        return Second(
            time.monotonic() - step_at, plan.pods, plan.at_us / 1e6 - wall, plan.reason, replicas[POOL],
            states.count("ready"), states.count("warm"), len(states), used_s, stolen_s, own_s(os.getpid()),
        )  # fmt: skip

    async def run(self, step_at: float) -> None:
        while True:
            if seen := await self.look(step_at):
                self.seconds.append(seen)
            left_s = (step_at - time.monotonic()) % 1.0
            await asyncio.sleep(left_s if left_s > 0.05 else left_s + 1.0)

    async def until_settled(self, replicas: int) -> None:
        """Wait until this number of replicas takes requests, and as many are wanted."""
        deadline = time.monotonic() + SETTLE_S
        while (seen := await self.look(time.monotonic())) is None or (seen.ready, seen.wanted) != (replicas, replicas):
            if time.monotonic() > deadline:
                raise SystemExit(f"{replicas} replicas are not ready after {SETTLE_S:g} s; last seen: {seen}")
            await asyncio.sleep(1)


async def measure(args: argparse.Namespace, running: Cluster) -> Run:
    plan = Plan(args.rate, args.factor, args.ramp, args.before, args.step, args.after, args.seed)
    client = RedisClient(running.redis_url)
    await client.start()
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=ANSWER_S)
    headers = {"authorization": f"Bearer {running.key}"}
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        watch = Watch(running, client)
        await watch.until_settled(args.replicas)
        print(f"{args.replicas} replicas are ready; the step comes in {args.before:g} s", file=sys.stderr)
        load = Load(plan, [gate.url for gate in running.gates()], session, args.retries)
        watching = asyncio.create_task(watch.run(load.step_at))
        try:
            await load.run()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await client.close()
    pods = [pod_of(pod, load.step_at) for pod in [*running.kubelet.past, *running.agents(POOL)]]
    facts = vars(args) | {"began": began, "cores": len(os.sched_getaffinity(0)), "late_s": sorted(load.late_s)}
    facts = {name: fact for name, fact in facts.items() if isinstance(fact, int | float | str | list)}
    return Run(facts, load.tries, watch.seconds, pods)


def pod_of(pod: KubePod, step_at: float) -> Pod:
    at_s = {what: at - step_at for at, what in reversed(pod.told)}
    return Pod(pod.name, at_s["bound"], at_s.get("begins"), at_s.get("ready"))


def run(args: argparse.Namespace) -> Run:
    replica = f"itl_ms={args.itl_ms:g},ttft_ms=100,max_num_seqs={args.slots},prefill_tokens_per_s=8000"
    replica += f",length_min={args.tokens // 2},length_max={args.tokens * 3 // 2}"
    plan = {"ttft_objective_s": args.objective, "cold_start_s": 60}
    declared = pool(POOL, replica, min=args.replicas, max=args.replicas_max, plan=plan)
    low_s, high_s = map(float, args.pull.split("-"))
    chance = random.Random(args.seed)

    def pull_s(pod: KubePod) -> float:
        return chance.uniform(low_s, high_s) if pod.component == "agent" else 0.0

    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), [declared], pull_s) as running:
        return asyncio.run(measure(args, running))


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.surge", description=__doc__, formatter_class=raw)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second before and after the step")
    parser.add_argument("--factor", type=float, default=5.0, help="factor of the step")
    parser.add_argument("--ramp", type=float, default=3.0, help="seconds in which the step is reached")
    parser.add_argument("--before", type=float, default=120.0, help="seconds before the step")
    parser.add_argument("--step", type=float, default=240.0, help="seconds of the step")
    parser.add_argument("--after", type=float, default=60.0, help="seconds after it")
    parser.add_argument("--retries", type=int, default=2, help="tries of a client after its first; 0: none")
    parser.add_argument("--replicas", type=int, default=4, help="replicas before the step, and the pool's minimum")
    parser.add_argument("--replicas-max", type=int, default=20)
    parser.add_argument("--slots", type=int, default=24, help="requests that a replica runs at once")
    parser.add_argument("--tokens", type=int, default=160, help="mean length of an answer; nobody is told")
    parser.add_argument("--itl-ms", type=float, default=40.0, help="duration of a replica's step")
    parser.add_argument("--objective", type=float, default=2.0, help="ttft_objective_s of the pool")
    parser.add_argument("--pull", default="48-58", metavar="LOW-HIGH", help="seconds before a pod's process begins")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was seen to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it as SVG")
    parser.add_argument("--of", type=Path, metavar="FILE", help="report about the JSON of an earlier run")
    args = parser.parse_args(argv)
    if args.of:
        found = msgspec.json.decode(args.of.read_bytes(), type=Run)
    elif missing := missing_programs():
        print(f"needs {', '.join(missing)} in {HOME / 'bin'}; run: make kube", file=sys.stderr)
        return 2
    else:
        found = run(args)
    if args.json:
        args.json.write_bytes(msgspec.json.encode(found))
    print(report(found))
    if args.plot:
        args.plot.write_text(draw(found))
    faults = faults_of(found)
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
