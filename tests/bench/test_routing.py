"""The routing benchmark compares like with like, and nobody in it knows what nobody can know."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.routing import bounds, hot, policies, report
from bench.routing.__main__ import main
from bench.routing.policies import OURS, POLICIES
from bench.routing.scene import scene
from inference.engines.sim.settings import SimSettings
from inference.simulate.agents import Agent
from inference.simulate.engine import SETTINGS, Engine
from inference.simulate.traces import Request, Trace, cut, scaled, sessions_of
from inference.simulate.world import AllReplicas, PlacementView, Run, World
from stream_fabric.pool.prefix import PrefixView
from stream_fabric.stream.ids import ReplicaId, StreamId

REPLICAS = 4
SMALL = msgspec.structs.replace(SETTINGS, num_blocks=160)
"""A cache of 10,240 tokens: it evicts and preempts."""


def chats(count: int, seed: int = 0) -> Trace:
    """Sessions whose turns extend one another, some of them with a beginning in common."""
    rng = random.Random(seed)
    unused = 1000
    open_chats: list[tuple[int, ...]] = []
    requests: list[Request] = []
    at_s = 0.0
    for number in range(count):
        at_s += rng.expovariate(10.0)
        if open_chats and rng.random() < 0.6:
            ids = open_chats.pop(rng.randrange(len(open_chats)))
        else:
            ids = tuple(range(rng.randrange(3)))
        more = rng.randrange(1, 5)
        ids += tuple(range(unused, unused + more))
        unused += more
        open_chats.append(ids)
        tokens = len(ids) * 512 - rng.randrange(500)
        requests.append(Request(number, at_s, tokens, rng.randrange(1, 120), ids, ""))
    sessions = sessions_of([(r.ids, r.prompt_tokens) for r in requests])
    named = tuple(replace(r, session=session) for r, session in zip(requests, sessions, strict=True))
    return Trace("chats", "", named)


def run(policy: str, trace: Trace, replicas: int = REPLICAS, seed: int = 0) -> Run:
    return World(trace.requests, replicas, policies.policy(policy, replicas, seed), seed).run()


def told(outcome: Run) -> list[tuple[object, ...]]:
    return [(v.fate, v.replica, v.first_s, v.end_s, v.cached_tokens) for v in outcome.lives]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return scene(chats(300), REPLICAS, 0.7).trace


@pytest.fixture(scope="module")
def runs(trace: Trace) -> dict[str, Run]:
    return {policy: run(policy, trace) for policy in POLICIES}


def test_all_policies_see_the_same_arrivals(runs: dict[str, Run]) -> None:
    seen = {policy: [(v.request, v.gateway, v.jitter) for v in found.lives] for policy, found in runs.items()}
    assert all(arrivals == seen["random"] for arrivals in seen.values())


def test_the_world_loses_and_invents_nothing(trace: Trace, runs: dict[str, Run]) -> None:
    for policy, found in runs.items():
        engines = found.engines
        assert all(v.fate == "done" for v in found.lives), policy
        assert sum(e.output_tokens for e in engines) == sum(r.output_tokens for r in trace.requests)
        assert sum(e.replica.prefix_queries for e in engines) == sum(r.prompt_tokens for r in trace.requests)
        assert sum(e.replica.prefix_hits for e in engines) == sum(v.cached_tokens for v in found.lives)
        assert all(v.request.at_s < v.first_s <= v.end_s for v in found.lives)
        assert not found.pool.at and not any(found.pool.flights.values())


def test_no_policy_hits_more_than_an_endless_cache(trace: Trace, runs: dict[str, Run]) -> None:
    most = bounds.infinite(trace.requests)
    assert 0.3 < most < 1
    for policy, found in runs.items():
        assert 0 < report.figures(policy, found).hit_rate <= most, policy


def test_a_larger_cache_reaches_more_up_to_the_endless_one(trace: Trace) -> None:
    sizes = (2_000, 20_000, 10**9)
    hits = [sum(bounds.cached_tokens(trace.requests, size)) for size in sizes]
    endless = bounds.infinite(trace.requests) * sum(r.prompt_tokens for r in trace.requests)
    assert hits[0] < hits[1] < hits[2] <= endless
    assert hits[2] > endless * 0.9  # whole small blocks only, and never the last token


def test_a_seed_replays_a_run_and_another_one_does_not(trace: Trace, runs: dict[str, Run]) -> None:
    assert told(run(OURS, trace)) == told(runs[OURS])
    assert told(run(OURS, trace, seed=1)) != told(runs[OURS])


@pytest.mark.parametrize("settings", [SETTINGS, SMALL], ids=["roomy", "preempts"])
def test_steps_taken_in_one_go_change_nothing(settings: SimSettings) -> None:
    short = tuple(r for r in chats(150, seed=5).requests if r.prompt_tokens < 5_000)
    requests = tuple(replace(r, number=n) for n, r in enumerate(short))
    worlds = [World(requests, 2, AllReplicas(), 0, settings, coasts=coasts).run() for coasts in (True, False)]
    assert told(worlds[0]) == told(worlds[1])
    for quick, plain in zip(worlds[0].engines, worlds[1].engines, strict=True):
        assert (quick.replica.preemptions, quick.replica.blocks.evictions) == (
            plain.replica.preemptions,
            plain.replica.blocks.evictions,
        )
        assert quick.output_tokens == plain.output_tokens
        assert quick.busy_s == pytest.approx(plain.busy_s)
    if settings is SMALL:
        assert sum(e.replica.preemptions for e in worlds[0].engines) > 0


def test_a_policy_blind_to_load_shows_the_hot_spot() -> None:
    requests = [Request(n, n / 100, 8192 + 512, 50, (*range(16), 100 + n), str(n)) for n in range(400)]
    ours, blind = (report.figures(p, run(p, Trace("hot", "", tuple(requests)))) for p in (OURS, "prefix"))
    assert blind.busy_ratio > 1.5 > 1.25 > ours.busy_ratio
    assert blind.ttft_p50_s > 3 * ours.ttft_p50_s
    assert ours.hit_rate > 0.85


def test_ours_beats_what_ignores_caches_and_what_ignores_load(runs: dict[str, Run]) -> None:
    figures = {policy: report.figures(policy, found) for policy, found in runs.items()}
    assert figures[OURS].hit_rate > 1.5 * figures["least-loaded"].hit_rate
    others = [found.ttft_p99_s for policy, found in figures.items() if policy != OURS]
    assert figures[OURS].ttft_p99_s < min(others)


def seen(matched: list[int], in_flight: list[int], prompts: list[list[int]], number: int = 99) -> PlacementView:
    """Make the view of replicas that have these prompts to compute."""
    agents = [Agent(ReplicaId(f"r{index}"), Engine(SETTINGS, lambda at_s: None)) for index in range(len(matched))]
    for agent, tokens in zip(agents, prompts, strict=True):
        for at, prompt in enumerate(tokens):
            agent.take(StreamId(f"s{at}"), Request(at, 0.0, prompt, 10, (), "s"), 0.0)
    return PlacementView(Request(number, 0.0, 1000, 10, (), f"session {number}"), 0, matched, in_flight, agents)


def test_the_rivals_weigh_as_their_projects_say() -> None:
    def chosen(name: str, view: PlacementView) -> int:
        (index,) = policies.policy(name, len(view.in_flight), 0).candidates(view)
        return index

    short_queue_or_cache = seen([0, 1000], [1, 2], [[500], [500, 500]])
    assert chosen("llm-d", short_queue_or_cache) == 1, "3 for the cache, 2 for the queue"
    assert chosen("llm-d", seen([0, 600], [1, 2], [[500], [500, 500]])) == 0
    assert chosen("dynamo", seen([0, 900], [1, 1], [[500], [900]])) == 1, "500 + 500 or 900 - 900 + 900"
    assert chosen("dynamo", seen([0, 900], [1, 1], [[500], [1500]])) == 0
    assert chosen("least tokens", seen([0, 1000], [1, 9], [[500], [400]])) == 1, "caches and streams are not asked"
    assert {chosen("two choices", seen([0, 0], [5, 4], [[], []])) for _ in range(9)} == {1}


def test_on_the_bounded_ring_a_session_stays_until_its_replica_has_a_quarter_more_than_the_others() -> None:
    ring = policies.policy("bounded ring", 4, 0)
    homes = [ring.candidates(seen([0] * 4, [0] * 4, [[]] * 4, number))[0] for number in range(200)]
    assert set(homes) == {0, 1, 2, 3} and max(homes.count(index) for index in range(4)) < 100
    home = homes[0]
    at_bound = [10] * 4
    at_bound[home] = 12
    assert ring.candidates(seen([0] * 4, at_bound, [[]] * 4, 0)) == [home], "14 are allowed where all have 43"
    at_bound[home] = 16
    assert ring.candidates(seen([0] * 4, at_bound, [[]] * 4, 0)) != [home]


def test_an_agent_does_not_know_how_long_answers_get() -> None:
    slots = []
    for output_tokens in (40, 1000):
        agent = Agent(ReplicaId("r"), Engine(SETTINGS, lambda at_s: None))
        agent.take(StreamId("a"), Request(0, 0.0, 3000, output_tokens, (), "a"), 0.0)
        agent.take(StreamId("b"), Request(1, 0.0, 3000, output_tokens, (), "b"), 0.0)
        agent.receive_first_tokens([(StreamId("a"), 0)], 0.2)
        slots.append(agent.slot(0.3))
    assert slots[0] == slots[1]
    assert slots[0].decode_ms > 0


def test_hints_are_stale_between_gateways_and_fresh_where_they_were_sent(trace: Trace) -> None:
    world = World(trace.requests, REPLICAS, AllReplicas(), 0)
    here, there = world.gateways[:2]
    request = trace.requests[0]
    here.views[1].sent(request.hint_hashes)
    assert here.matched_tokens(request)[1] == len(request.hint_hashes) * 128
    assert not any(there.matched_tokens(request))
    world.agents[1].take(StreamId("x"), request, 0.0)
    there.refresh(world.agents)
    assert not any(there.matched_tokens(request)), "nothing is known before the agent has published it"
    world.agents[1].renew()
    there.refresh(world.agents)
    assert there.matched_tokens(request)[1] == here.matched_tokens(request)[1]


def test_a_view_keeps_what_was_sent_until_the_summary_after_the_next() -> None:
    view = PrefixView()
    view.sent([1, 2, 3])
    view.renew(b"", 1)
    assert view.match([1, 2, 3, 4]) == 3
    view.renew(b"", 2)
    assert view.match([1, 2, 3, 4]) == 0


def test_hot_variants_differ_in_nothing_but_the_prefix() -> None:
    sets = hot.variants(chats(200), seed=3)
    for shared, distinct, bare in zip(*(s.requests for s in sets), strict=True):
        assert shared.at_s == distinct.at_s == bare.at_s
        assert shared.output_tokens == distinct.output_tokens == bare.output_tokens
        if shared.tenant == hot.OTHERS:
            assert shared == distinct == bare
        else:
            assert shared.prompt_tokens == distinct.prompt_tokens == bare.prompt_tokens + 8192
            assert shared.ids[16:] == distinct.ids[16:] == bare.ids
    tenants = [r.tenant for r in sets.shared.requests]
    assert 0.35 < tenants.count(hot.HOT) / len(tenants) < 0.65
    fresh = [value for r in sets.distinct.requests if r.tenant == hot.HOT for value in r.ids]
    known = {value for r in sets.distinct.requests if r.tenant == hot.OTHERS for value in r.ids}
    assert len(fresh) == len(set(fresh)) and not known & set(fresh)
    assert len({r.ids[:16] for r in sets.shared.requests if r.tenant == hot.HOT}) == 1


def test_a_trace_is_turned_and_scaled_whole() -> None:
    trace = chats(90)
    turned = cut(trace, 10**6, seed=1)
    assert sorted(r.ids for r in turned.requests) == sorted(r.ids for r in trace.requests)
    assert turned.requests[0].ids == trace.requests[30].ids
    times = [r.at_s for r in scaled(turned, 20.0).requests]
    assert times == sorted(times) and times[0] == 0 and times[-1] == pytest.approx(20.0)
    assert len(cut(trace, 40, seed=2).requests) == 40


def test_a_session_is_a_chain_of_prompts_that_extend_one_another() -> None:
    prompts = [
        ((1, 2, 3), 1500),  # its last block is not whole
        ((1, 2, 4, 5), 2048),  # holds its whole blocks: the next turn
        ((1, 2, 9), 1536),  # shares a beginning only
        ((1, 2, 4, 5, 6), 2100),
        ((7,), 100),
    ]
    assert sessions_of(prompts) == ["0", "0", "2", "0", "4"]


def test_absent_traces_are_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(tmp_path)]) == 2
    assert "STREAM_GW_TRACES" in capsys.readouterr().err


def test_a_small_run_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"2023-11-16 18:15:{n / 10:010.7f},{100 + n},{5 + n % 7}" for n in range(60)]
    (tmp_path / "azure_conv_2023.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    lines = [
        msgspec.json.encode(
            {
                "timestamp": round(r.at_s * 1000),
                "input_length": r.prompt_tokens,
                "output_length": r.output_tokens,
                "hash_ids": r.ids,
            }
        )
        for r in chats(60).requests
    ]
    (tmp_path / "mooncake_synthetic.jsonl").write_bytes(b"\n".join(lines))
    code = main(["--folder", str(tmp_path), "--replicas", "2", "--policies", f"random,{OURS}"])
    out = capsys.readouterr().out
    assert code in (0, 1)
    assert out.count(f"| {OURS} ") == 2 + 4
    assert "every prompt is distinct" in out
