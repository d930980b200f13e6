"""The hot prefix: what one tenant's popular prompt costs the other tenants.

Half of a trace's requests, drawn by the seed, belong to tenant "hot" and have 8,192 tokens before their prompts, which
are nobody else's. Three sets of requests have the same arrivals, and the others' requests are the same in all:

- ``shared``: the 8,192 tokens are always the same;
- ``distinct``: they are always others, so lengths are the same and nothing of them is cached;
- ``bare``: they are left out, which is about the work that is left when they are cached.

``shared`` is compared with ``distinct`` at arrivals that make ``distinct`` use the fleet as far as stated, and with
``bare`` at arrivals that make ``bare`` do so. The second comparison is the hard one: the first gives ``shared`` a fleet
that has less to do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import NamedTuple

from bench.routing import policies
from bench.routing.scene import duration_s
from inference.simulate.traces import TRACE_BLOCK_TOKENS, Request, Trace, scaled
from inference.simulate.world import World

HOT_SHARE = 0.5
PREFIX_IDS = 16
HOT, OTHERS = "hot", "others"


class Variants(NamedTuple):
    shared: Trace
    distinct: Trace
    bare: Trace


@dataclass(frozen=True)
class Compared:
    trace: str
    replicas: int
    policy: str
    control: str
    others_p99_s: float
    others_control_p99_s: float
    hot_p99_s: float

    @property
    def ratio(self) -> float:
        return self.others_p99_s / self.others_control_p99_s


def variants(trace: Trace, seed: int) -> Variants:
    rng = random.Random(f"hot {seed}")
    unused = 1 + max((max(r.ids) for r in trace.requests if r.ids), default=0)
    prefix = tuple(range(unused, unused + PREFIX_IDS))
    unused += PREFIX_IDS
    shared: list[Request] = []
    distinct: list[Request] = []
    bare: list[Request] = []
    for request in trace.requests:
        if rng.random() >= HOT_SHARE:
            for requests in (shared, distinct, bare):
                requests.append(replace(request, tenant=OTHERS))
            continue
        blocks = PREFIX_IDS + -(-request.prompt_tokens // TRACE_BLOCK_TOKENS)
        ids = tuple(range(unused, unused + blocks))
        unused += blocks
        tokens = PREFIX_IDS * TRACE_BLOCK_TOKENS + request.prompt_tokens
        long = replace(request, prompt_tokens=tokens, ids=ids, session=f"hot {request.number}", tenant=HOT)
        shared.append(replace(long, ids=prefix + ids[PREFIX_IDS:]))
        distinct.append(long)
        bare.append(replace(long, prompt_tokens=request.prompt_tokens, ids=ids[PREFIX_IDS:]))
    return Variants(*(replace(trace, requests=tuple(requests)) for requests in (shared, distinct, bare)))


def compare(trace: Trace, replicas: int, policy: str, seed: int, utilisation: float) -> list[Compared]:
    sets = variants(trace, seed)
    rows: list[Compared] = []
    for control, requests in (("distinct", sets.distinct), ("bare", sets.bare)):
        pace_s = duration_s(requests, replicas, utilisation)
        others, hot = _p99s(scaled(sets.shared, pace_s), replicas, policy, seed)
        others_control, _ = _p99s(scaled(requests, pace_s), replicas, policy, seed)
        rows.append(Compared(trace.name, replicas, policy, control, others, others_control, hot))
    return rows


def _p99s(trace: Trace, replicas: int, policy: str, seed: int) -> tuple[float, float]:
    """p99 TTFT of the other tenants, and of the hot one."""
    lives = World(trace.requests, replicas, policies.policy(policy, replicas, seed), seed).run().lives
    tenants = [sorted(v.ttft_s for v in lives if v.request.tenant == tenant) for tenant in (OTHERS, HOT)]
    others, hot = (ttft_s[len(ttft_s) * 99 // 100] for ttft_s in tenants)
    return others, hot
