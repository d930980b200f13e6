"""The arithmetic of a fleet, held to the simulation of it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from inference.control.policy.scale_policy import ScalePolicy
from inference.simulate import hardware as profiles
from inference.simulate.capacity import Answer, Margins, capacity
from inference.simulate.elastic import Elastic
from inference.simulate.engine import Engine
from inference.simulate.hardware import ASSUMED, Attention, Hardware, Profile, hardware
from inference.simulate.scalers import Fixed
from inference.simulate.study import Objective, Outcome, Study, run
from inference.simulate.traces import Request
from inference.simulate.workload import Workload, from_rates, from_trace, parse_lengths
from tests.simulate.traffic import PROFILE, chats, slow

NO_MARGIN = Margins(aimed=1.0, spare=0, warm_share=0.0, itl_ms=10_000)


def steady(per_s: float, prompt: float, output: float) -> Workload:
    return from_rates(per_s, parse_lengths(f"{prompt:g}"), parse_lengths(f"{output:g}"), 1.0, 0.0)


def alike(count: int, per_s: float, prompt: int, output: int) -> list[Request]:
    rng, at_s, out = random.Random(4), 0.0, []
    for number in range(count):
        at_s += rng.expovariate(per_s)
        out.append(Request(number, at_s, prompt, output, (), str(number)))
    return out


def fleet(requests: list[Request], replicas: int, one: Hardware) -> Elastic:
    return Elastic(requests, replicas, Fixed(), 0, one.settings, cold_start_s=60.0)


# --- what one replica does ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "output", "prefill_per_s"),
    [(200, 100, 2000), (1000, 20, 2000), (20, 200, 2000), (2000, 8, 100_000)],
    ids=["both", "prefill", "decode", "steps that are full of prompts"],
)
def test_a_full_replica_serves_as_many_as_reckoned(prompt: int, output: int, prefill_per_s: float) -> None:
    one = slow(prefill_tokens_per_s=prefill_per_s)
    rate = capacity(steady(1.0, prompt, output), one, NO_MARGIN).replica_per_s
    due = [0.0]
    engine = Engine(one.settings, lambda at_s: due.__setitem__(0, at_s))
    requests = alike(1000, 1.0, prompt, output)
    for request in requests:
        assert engine.add(request, 0.0)
    while engine.running:
        engine.wake(due[0])
    assert len(requests) / due[0] == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize(
    ("prompt", "output", "aimed", "rel"), [(300, 120, 0.7, 0.1), (1000, 5, 0.3, 0.25)], ids=["decode", "prefill"]
)
def test_what_runs_at_once_is_what_the_simulation_runs(prompt: int, output: int, aimed: float, rel: float) -> None:
    one, per_s = slow(), 6.0
    answer = capacity(steady(per_s, prompt, output), one, Margins(aimed=aimed, spare=0))
    world = fleet(alike(1500, per_s, prompt, output), answer.replicas, one)
    world.run()
    running = [sample.running for sample in world.samples if 30 < sample.at_s < 220]
    assert answer.running == pytest.approx(sum(running) / len(running), rel=rel)


def test_kv_memory_bounds_the_batch_where_it_is_short_and_the_simulation_agrees() -> None:
    short = slow(slots=32, kv_tokens=6400)
    answer = capacity(steady(2.0, 400, 200), short, NO_MARGIN)
    assert (answer.batch, answer.batch_bound) == (12, "KV memory")  # 6400 / (400 + 200 / 2)
    assert "KV memory, not compute, bounds the batch" in " ".join(answer.arithmetic["replica"])
    world = fleet([replace(r, at_s=r.at_s * 1e-3) for r in alike(100, 1.0, 400, 200)], 1, short)
    engine = world.agents[0].engine
    runs = []
    look = world._run_scaler

    def seen() -> None:
        runs.append(len(engine.replica.running))
        look()

    world._run_scaler = seen  # type: ignore[method-assign]
    world.run()
    steadily = runs[15:60]
    assert sum(steadily) / len(steadily) == pytest.approx(answer.batch, rel=0.2)

    plenty = capacity(steady(2.0, 400, 200), slow(), NO_MARGIN)
    assert (plenty.batch, plenty.batch_bound) == (32, "slots")
    assert plenty.replica_per_s > answer.replica_per_s


# --- the fleet ---------------------------------------------------------------------------------------------------


def test_at_the_answered_count_the_objective_is_met_and_clearly_below_it_is_not() -> None:
    requests, one = chats(300, 6.0), slow()
    answer = capacity(from_trace("made", requests, one.settings, 60.0, 0.0), one, Margins())
    asked = Study(requests, one, ScalePolicy(cold_start_s=60.0), Objective(2.0, 1e-3, 0.1))

    def fixed(count: int) -> Outcome:
        return run(asked, f"fixed:{count}")

    assert 6 <= answer.serving < answer.replicas
    assert fixed(answer.serving).slo > 0.99
    assert fixed(answer.serving // 2).slo < 0.6
    dies = replace(asked, kills_s=(120.0,))
    assert run(dies, f"fixed:{answer.replicas}").slo > 0.98, "one more than serve, and one dies at the peak"


def of(work: Workload, margins: Margins, one: Hardware | None = None) -> Answer:
    return capacity(work, one or slow(), margins)


def test_a_fuller_aim_needs_fewer_and_margins_more() -> None:
    work = steady(40.0, 500, 150)
    plain = of(work, Margins(spare=0, warm_share=0.0))
    assert plain.replicas == plain.serving
    assert of(work, Margins(aimed=0.8, spare=0, warm_share=0.0)).serving < plain.serving
    assert of(work, Margins(spare=2, warm_share=0.0)).replicas == plain.serving + 2
    warm = of(work, Margins(spare=2, warm_share=0.2))
    assert warm.replicas == plain.serving + max(2, warm.warm) and warm.warm == round(0.2 * plain.serving) > 2
    assert (warm.gpus, plain.gpus) == (2 * warm.replicas, 2 * plain.replicas)


def test_a_gap_that_is_to_be_kept_needs_more_replicas_and_an_impossible_one_is_refused() -> None:
    work = steady(40.0, 500, 150)
    loose, tight = of(work, Margins(itl_ms=500)), of(work, Margins(itl_ms=45))
    assert loose.itl_ms > 45 >= tight.itl_ms
    assert tight.serving > loose.serving
    with pytest.raises(ValueError, match=r"every 40\.0 ms, over 30 ms"):
        of(work, Margins(itl_ms=30))


def test_what_is_cached_costs_no_prefill() -> None:
    half = replace(steady(40.0, 500, 150), cached_share=0.5)
    assert of(half, Margins()).replica_per_s == pytest.approx(of(steady(40.0, 250, 150), Margins()).replica_per_s)


def test_dollars_are_gpus_by_the_hour_and_less_for_a_pool_that_follows_its_load() -> None:
    one = slow()
    work = from_rates(20.0, parse_lengths("500"), parse_lengths("150"), 3.0, 0.0)
    answer = of(work, Margins(), one)
    assert answer.dollars_per_month == pytest.approx(answer.gpus * 2.5 * 730)
    assert answer.dollars_per_month_elastic < 0.5 * answer.dollars_per_month
    assert "money" in answer.arithmetic
    assert "money" not in of(work, Margins(), replace(one, gpu_hour=0.0)).arithmetic


def test_one_sequence_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="one sequence holds"):
        capacity(steady(1.0, 5000, 100), slow(kv_tokens=4096), NO_MARGIN)


# --- what is asked -----------------------------------------------------------------------------------------------


def test_quantiles_are_those_of_the_lognormal_that_is_taken() -> None:
    rng = random.Random(0)
    sample = sorted(rng.lognormvariate(6, 0.9) for _ in range(100_000))
    text = f"p50={sample[50_000]:.1f},p95={sample[95_000]:.1f},p99={sample[99_000]:.1f}"
    lengths = parse_lengths(text)
    assert lengths.mean == pytest.approx(sum(sample) / len(sample), rel=0.03)
    assert lengths.square == pytest.approx(sum(x * x for x in sample) / len(sample), rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "-1", "many", "p50=5", "p50=5,p50=7", "p50=900,p95=100", "p0=1,p50=5", "q1=4,p2=5"]
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_lengths(text)


def test_the_peak_of_a_trace_is_the_window_with_most_work() -> None:
    even = [Request(n, float(n), 100, 50, (), str(n)) for n in range(600)]
    heavy = [Request(n, 120 + n * 2.0, 5000, 50, (), str(n)) for n in range(30)]
    requests = sorted([*even, *heavy], key=lambda request: request.at_s)
    work = from_trace("t", requests, slow().settings, 60.0, 0.0)
    assert work.peak_per_s == pytest.approx(1.5)
    assert work.prompt_tokens == pytest.approx((60 * 100 + 30 * 5000) / 90)
    assert work.mean_per_s == pytest.approx(630 / 599)
    assert "begin at 120 s" in work.steps[1]
    with pytest.raises(ValueError, match="less than one window"):
        from_trace("t", requests, slow().settings, 900.0, 0.0)


def test_a_running_sequence_is_likelier_a_long_one() -> None:
    requests = [Request(n, n * 1.0, 10, 10 if n % 2 else 1000, (), str(n)) for n in range(100)]
    work = from_trace("t", requests, slow().settings, 60.0, 0.0)
    assert work.output_tokens == pytest.approx(505, rel=0.02)
    assert work.held_tokens == pytest.approx(505, rel=0.03), "half of 1000 and its prompt, not half of 505"


# --- what a replica is -------------------------------------------------------------------------------------------


def test_a_profile_is_read_and_its_arithmetic_shown(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(PROFILE)
    found = profiles.load(path)
    assert found.settings.itl_ms == pytest.approx(40.0)
    assert found.settings.batch_slope_us == pytest.approx(500.0, rel=1e-3)
    assert (found.settings.max_num_seqs, found.gpus, found.gpu_hour) == (32, 2, 2.5)
    assert found.kv_tokens == 200_000 // 64 * 64


def test_memory_follows_from_the_model_and_its_gpus() -> None:
    rates = {"1": 60.0, "16": 800.0, "128": 3800.0}
    model = Attention(layers=80, kv_heads=8, head_dim=128)
    found = hardware(
        Profile(8000, 128, rates, gpus=4, attention=model, gpu_memory_gib=80, weights_gib=131.5, other_gib=10)
    )
    assert found.kv_bytes_per_token == 327_680
    assert found.kv_tokens == pytest.approx((4 * 80 * 0.9 - 141.5) * 2**30 / 327_680, rel=1e-3)
    assert "off by" in found.steps[0]
    assert any("131.5 GiB weights - 10 GiB other = 146.5 GiB" in step for step in found.steps)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slots = 0", "slots"),
        ("slots = 4\nspeed = 3", "speed"),
        ("kv_tokens = 0", "how much KV"),
        ("gpu_memory_gib = 10\nkv_bytes_per_token = 1000\nkv_tokens = 0\nweights_gib = 90", "does not fit"),
        ("decode_tokens_per_s = { few = 3 }", "'few' is no batch size"),
        ("decode_tokens_per_s = {}", "no batch size"),
        ("decode_tokens_per_s = { 1 = 100, 32 = 50 }", "no GPU"),
        ("what", "p.toml"),
    ],
)
def test_a_wrong_profile_is_refused_with_its_name(tmp_path: Path, text: str, says: str) -> None:
    given = {line.split(" ")[0] for line in text.splitlines()}
    kept = [line for line in PROFILE.splitlines() if line.split(" ")[0] not in given]
    path = tmp_path / "p.toml"
    path.write_text("\n".join([*kept, text]))
    with pytest.raises(ValueError) as refused:
        profiles.load(path)
    assert str(path) in str(refused.value) and says in str(refused.value), refused.value


def test_what_is_assumed_says_that_it_was_not_measured() -> None:
    assert "not measured" in ASSUMED.steps[0]
    assert "assumed" in ASSUMED.name
