"""The list of names: that it can be used as it is, and that registries show what it says and nothing else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from inference.agent.observe.metrics import AgentMetrics, ItlHistogram
from inference.control.metrics import ControllerMetrics, Shortfall, decision_kind
from inference.control.policy.fleet_view import pending_work, profile_of
from inference.engines.prometheus import CONTRACT, missing_metrics
from stream_fabric.events import AttemptTrace, FleetEvent
from stream_fabric.gap_histogram import itl_bucket
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import EngineLoad, ReplicaInfo, TierQueue
from stream_fabric.process import metric_names as listed
from stream_fabric.process.metric_names import METRICS, Role
from stream_fabric.process.metrics_registry import OTHER, CappedLabels, CountingSink, MetricsRegistry
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId
from stream_gw.observe.metrics import Metrics, fault
from stream_gw.observe.trace import ReaderOutcome
from telemetry.consume.metrics import ConsumerMetrics
from telemetry.emit.transport import Record
from tests.support.events import Heard
from tests.telemetry.sinks import make_sink

ROOT = Path(__file__).parents[2]
UNITS = {"seconds", "bytes", "tokens"}


class Nowhere:
    name = "nowhere"

    async def send(self, batch: Sequence[Record]) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_a_name_is_one_that_nobody_changes(metric: listed.Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name), "no colon: some client libraries write an underscore for it"
    assert metric.name.endswith("_total") is (metric.kind == "counter")
    assert bool(metric.buckets) is (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(metric.buckets)
    assert not set(metric.labels) & {"tenant", "user", "stream", "request", "session", "adapter", "le"}
    assert metric.help and metric.roles
    if metric.unit in UNITS:
        assert metric.unit in metric.name, "the unit is told by the name"


def families(registry: CollectorRegistry) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield name, family.type, tuple(getattr(family, "_labelnames", ()))


def shown(registry: CollectorRegistry) -> set[tuple[str, str]]:
    return {(name, kind) for name, kind, _ in families(registry)}


async def test_each_role_shows_what_the_list_says_and_nothing_else() -> None:
    roles: dict[Role, CollectorRegistry] = {
        "gateway": Metrics().registry,
        "agent": AgentMetrics("p").registry,
        "controller": ControllerMetrics().registry,
        "telemetry": ConsumerMetrics()._exposition.registry,
    }
    for role, registry in roles.items():
        if role != "telemetry":
            make_sink(Nowhere(), registry=registry)
        assert shown(registry) == {(metric.name, metric.kind) for metric in listed.metrics_of(role)}, role


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_the_pages_name_metrics_that_there_are(page: str) -> None:
    """A word in code quotes that looks like a metric of ours is one."""
    words = set(re.findall(r"`([a-z][a-z0-9]*(?:_[a-z0-9]+)+)(?:\{[^`]*\})?`", (ROOT / page).read_text()))
    series = {name for metric in METRICS.values() for name in metric.series} | set(METRICS)
    stems = tuple({name.split("_")[0] + "_" for name in METRICS})
    endings = ("_total", "_seconds", "_bytes", "_seqs", "_tokens", "_bucket")
    looks = {word for word in words if word.endswith("_total") or (word.endswith(endings) and word.startswith(stems))}
    looks -= {"budget_tokens"}  # a field of the Messages API
    assert looks <= series, f"unknown: {sorted(looks - series)}"


def test_the_metrics_page_is_the_list() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == listed.docs_page(), (
        "run: python -m stream_fabric.process.metric_names > docs/metrics.md"
    )


# --- gateways ------------------------------------------------------------------------------------------------


def over(**changes: object) -> ReaderOutcome:
    whole = ReaderOutcome(
        "p", "created", "completed", 200, "", 2_000_000, 80_000, 12, "ab" * 16, "req_1", "resp_" + "0" * 32,
        TenantId("acme"), dialect="openai.chat",
    )  # fmt: skip
    return whole._replace(**changes)  # type: ignore[arg-type]


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in parse_text(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_a_gateway_counts_every_reader_by_whose_fault_it_was() -> None:
    metrics = Metrics()
    metrics.receive_outcome(over())
    metrics.receive_outcome(over(ended="failed", http_status=502, error_code="engine_error"))
    metrics.receive_outcome(over(ended="failed", http_status=400, error_code="invalid_request"))
    metrics.receive_outcome(
        over(role="refused", ended="refused", http_status=503, error_code="pool_full", ttft_us=0, dialect="")
    )
    metrics.receive_outcome(over(role="resumed", ended="left"))
    seen = samples(metrics.exposition.render().body.decode())
    assert seen["reads_total{ended=completed,fault=none,pool=p,role=created}"] == 1
    assert seen["reads_total{ended=failed,fault=platform,pool=p,role=created}"] == 1
    assert seen["reads_total{ended=failed,fault=client,pool=p,role=created}"] == 1
    assert seen["reads_total{ended=refused,fault=platform,pool=p,role=refused}"] == 1
    assert seen["reads_by_dialect_total{dialect=openai.chat,fault=platform}"] == 1
    assert seen["reads_by_dialect_total{dialect=openai.chat,fault=none}"] == 1
    assert seen["reads_by_dialect_total{dialect=openai.chat,fault=client}"] == 2
    assert seen["reads_by_dialect_total{dialect=none,fault=platform}"] == 1, "refused before its dialect was known"
    assert seen["sheds_total{layer=pool}"] == 1 and seen["sheds_total{layer=queue}"] == 0
    assert seen["ttft_seconds_count{pool=p}"] == 3, "of requests that made a stream"
    assert seen["ttft_seconds_bucket{le=0.1,pool=p}"] == 3
    assert seen["tokens_streamed_total{pool=p}"] == 60


@pytest.mark.parametrize(
    ("tier", "counted"), [("interactive", True), ("standard", True), ("batch", False), ("free", False)]
)
def test_batch_work_that_waits_or_is_rejected_breaks_no_objective(tier: str, counted: bool) -> None:
    metrics = Metrics()
    rejected = {"role": "refused", "ended": "refused", "http_status": 503, "ttft_us": 0}
    metrics.receive_outcome(over(tier=tier, ttft_us=60_000_000))
    metrics.receive_outcome(over(tier=tier, error_code="pool_busy", **rejected))
    metrics.receive_outcome(over(tier=tier, error_code="no_replica", **rejected))
    seen = samples(metrics.exposition.render().body.decode())
    assert seen["reads_total{ended=refused,fault=platform,pool=p,role=refused}"] == 1 + counted
    assert seen["reads_by_dialect_total{dialect=openai.chat,fault=platform}"] == 1 + counted
    assert seen[f"pool_sheds_total{{pool=p,tier={tier}}}"] == 1
    assert seen.get("ttft_seconds_count{pool=p}", 0) == counted


def test_by_how_much_a_first_token_differs_from_what_placement_expected() -> None:
    metrics = Metrics()
    for error_us in (None, -600_000, 40_000, 700_000):
        metrics.receive_outcome(over(ttft_error_us=error_us))
    seen = samples(metrics.exposition.render().body.decode())
    below = [seen[f"ttft_error_seconds_bucket{{le={bound},pool=p}}"] for bound in (-1.0, -0.5, 0.1, 0.5, 1.0, "+Inf")]
    assert below == [0, 1, 2, 2, 3, 3]


def test_failures_are_shown_from_0_on_because_prometheus_counts_none_of_a_series_first_sample() -> None:
    metrics = Metrics()
    assert (
        samples(metrics.exposition.render().body.decode())[
            "reads_total{ended=refused,fault=platform,pool=,role=refused}"
        ]
        == 0
    )
    metrics.receive_outcome(over())
    seen = samples(metrics.exposition.render().body.decode())
    assert seen["reads_total{ended=failed,fault=platform,pool=p,role=created}"] == 0
    assert seen["reads_total{ended=refused,fault=platform,pool=p,role=refused}"] == 0
    assert seen["reads_by_dialect_total{dialect=openai.chat,fault=platform}"] == 0


def test_a_cancel_is_nobodys_fault_and_a_stalled_reader_its_own() -> None:
    assert fault(over(ended="cancelled")) == "none"
    assert fault(over(ended="stalled")) == "client"


def test_a_time_to_first_token_names_its_trace_where_openmetrics_is_asked_for() -> None:
    metrics = Metrics()
    metrics.receive_outcome(over())
    page = metrics.exposition.render("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5")
    assert page.content_type.startswith("application/openmetrics-text; version=1.0.0")
    found = [
        sample.exemplar.labels
        for family in parse_openmetrics(page.body.decode())
        for sample in family.samples
        if sample.exemplar is not None
    ]
    assert found == [{"trace_id": "ab" * 16}]
    names = {sample.name for family in parse_openmetrics(page.body.decode()) for sample in family.samples}
    assert names <= {name for metric in METRICS.values() for name in metric.series}
    assert b"trace_id" not in metrics.exposition.render("text/plain").body


def test_a_label_has_only_so_many_values() -> None:
    capped = CappedLabels(2)
    assert [capped(value) for value in "abcab"] == ["a", "b", OTHER, "a", "b"]


async def test_a_scrape_of_a_thousand_series_does_not_hold_the_loop() -> None:
    """Rendered in the loop it would not turn once."""
    exposition = MetricsRegistry("gateway")
    requests = exposition.counter(listed.REQUESTS)
    durations = exposition.histogram(listed.REQUEST_DURATION)
    for number in range(1000):
        requests.labels(f"/{number}", "200").inc()
        durations.labels(f"pool{number}").observe(0.2)
    turns = 0
    scrape = asyncio.create_task(exposition.scraped())
    while not scrape.done():
        await asyncio.sleep(0)
        turns += 1
    body = scrape.result().body
    assert body.count(b"\n") > 15_000
    assert turns > 5, turns


# --- agents --------------------------------------------------------------------------------------------------


def attempt(**changes: object) -> AttemptTrace:
    told = {
        "id": "a", "at_us": 1, "stream": StreamId("resp_" + "0" * 32), "tenant": TenantId("t"), "model": "m",
        "pool": "p", "replica": ReplicaId("r"), "ended": "completed", **changes,
    }  # fmt: skip
    return AttemptTrace(**told)  # type: ignore[arg-type]


def test_gaps_between_tokens_are_counted_exactly_from_sketches() -> None:
    gaps_us = [100, 1023, 1024, 20_000, 49_151, 49_152, 98_303, 98_304, 5_000_000]
    sketch = [0] * (1 + max(map(itl_bucket, gaps_us)))
    for gap in gaps_us:
        sketch[itl_bucket(gap)] += 1
    itl = ItlHistogram("p")
    itl.add(sketch)
    itl.add([2])
    registry = CollectorRegistry()
    registry.register(itl)

    def below(le: str) -> float | None:
        return registry.get_sample_value("inter_token_latency_seconds_bucket", {"pool": "p", "le": le})

    assert below("0.001024") == 2 + sum(gap < 1024 for gap in gaps_us)
    assert below("0.049152") == 2 + sum(gap < 49_152 for gap in gaps_us)
    assert below("0.098304") == 2 + sum(gap < 98_304 for gap in gaps_us)
    assert below("+Inf") == 2 + len(gaps_us)
    total = registry.get_sample_value("inter_token_latency_seconds_sum", {"pool": "p"})
    assert total == pytest.approx(sum(gaps_us) / 1e6, rel=0.125)


def test_an_agents_attempts_pass_on_and_are_counted() -> None:
    metrics, heard = AgentMetrics("p"), Heard()
    sink = CountingSink(metrics.receive, heard)
    told = attempt(prompt_tokens=40, generated_tokens=7, prefill_us=30_000, itl_sketch=(0, 0, 6))
    sink.emit(told)
    sink.emit(attempt(ended="lost"))
    assert heard.attempts[0] is told and len(heard.attempts) == 2
    value = metrics.registry.get_sample_value
    assert value("attempts_total", {"pool": "p", "ended": "completed"}) == 1
    assert value("tokens_prompt_total", {"pool": "p"}) == 40
    assert value("prefill_seconds_count", {"pool": "p"}) == 1, "of the lost one nothing was made"
    assert value("inter_token_latency_seconds_count", {"pool": "p"}) == 6


VLLM = b"".join(name.encode() + b'{engine="0"} 1\n' for name in CONTRACT)


def test_vllms_metrics_are_held_to_what_we_rely_on() -> None:
    assert missing_metrics(VLLM) == []
    assert missing_metrics(b"llamacpp:requests_processing 1\n") == [], "another server's"
    older = VLLM.replace(b"prefix_cache_hits_total", b"prefix_cache_hits")
    assert missing_metrics(older) == [], "older clients' spelling"
    assert missing_metrics(VLLM.replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")) == [
        "vllm:kv_cache_usage_perc"
    ]
    renamed = missing_metrics(VLLM.replace(b"vllm:num_requests_waiting", b"vllm_num_requests_waiting"))
    assert renamed == ["vllm:num_requests_waiting (there is vllm_num_requests_waiting)"]


# --- controllers ---------------------------------------------------------------------------------------------


def replica(state: str = "ready", **changes: object) -> ReplicaInfo:
    load = EngineLoad(running=8, waiting=0, slots=10)
    told = {"prefill_ms": 500.0, "decode_ms": 1500.0, "prefill_per_s": 1000.0, "decode_per_s": 100.0, **changes}
    return ReplicaInfo(ReplicaId("r"), "p", "sim", ("m",), state, load, **told)  # type: ignore[arg-type]


NONE_WAIT = [TierQueue(0, 0.0, 0, 0)] * 4


def test_a_pools_backlog_is_what_runs_and_what_waits() -> None:
    both = [replica(), replica()]
    assert pending_work(both, NONE_WAIT, profile_of(both)) == (16, 0, 0.0, 0.5, 2.0, 1.6)
    lines = [TierQueue(4, 1.0, 2000, 400), *NONE_WAIT[1:]]
    found = pending_work(both, lines, profile_of(both))
    assert found.queue_s == pytest.approx(2000 / 1000 + 400 / 100)
    assert found.backlog_s == pytest.approx(0.5 + found.queue_s / 2)
    assert found.to_free_s == pytest.approx(found.backlog_s + 1.5) and found.busy == 2.0


def test_a_pool_without_a_replica_has_a_backlog_still() -> None:
    assert pending_work([], [TierQueue(2, 9.0, 100, 50), *NONE_WAIT[1:]], None) == (0, 2, 150.0, 150.0, 150.0, 2.0)
    assert pending_work([], NONE_WAIT, None) == (0, 0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("metrics", [Metrics(), ControllerMetrics()], ids=["gateway", "controller"])
def test_whoever_finds_a_dead_replica_counts_it(metrics: Metrics | ControllerMetrics) -> None:
    heard = Heard()
    CountingSink(metrics.receive, heard).emit(FleetEvent("x", 1, "dead", "reaper"))
    assert metrics.registry.get_sample_value("dead_replicas_total") == 1 and len(heard.events) == 1


def test_batch_work_that_waits_is_no_backlog() -> None:
    metrics = ControllerMetrics()
    backlog_s, waits, none = [], TierQueue(100, 600.0, 100_000, 50_000), NONE_WAIT[0]
    for queues in ([none] * 4, [none, none, waits, waits], [none, waits, none, none]):
        metrics.receive_pools({"p": ([replica()], queues)})
        backlog_s.append(metrics.registry.get_sample_value("pool_backlog_seconds", {"pool": "p"}) or 0.0)
    assert backlog_s[0] == backlog_s[1] < 5 < backlog_s[2]


def test_a_controller_forgets_a_pool_that_is_gone() -> None:
    metrics = ControllerMetrics()
    value = metrics.registry.get_sample_value
    metrics.receive_pools({"p": ([replica(), replica("warm")], [TierQueue(3, 2.5, 1, 1), *NONE_WAIT[1:]])})
    assert value("pool_replicas", {"pool": "p", "state": "ready"}) == 1
    assert value("pool_queue_age_seconds", {"pool": "p", "priority": "interactive"}) == 2.5
    metrics.receive_pools({})
    assert value("pool_replicas", {"pool": "p", "state": "ready"}) is None


def test_a_pool_is_short_while_none_comes() -> None:
    short = Shortfall()
    assert short.receive(3, 3, 0.0) == 0
    assert [short.receive(3, 5, now) for now in (10.0, 70.0)] == [0, 60]
    assert [short.receive(4, 6, now) for now in (80.0, 100.0)] == [0, 20], "one came"
    assert short.receive(3, 6, 110.0) == 30, "one that goes is none that comes"
    assert [short.receive(6, 6, 120.0), short.receive(2, 6, 130.0), short.receive(2, 6, 131.0)] == [0, 0, 1]


def test_a_pool_that_is_to_have_a_replica_and_has_none_is_short() -> None:
    metrics = ControllerMetrics()
    value = metrics.registry.get_sample_value
    metrics.receive_plans({"p": PoolPlan(1, 0, 1), "q": PoolPlan(1, 0, 1)}, leads=False)
    there = {"q": ([replica()], NONE_WAIT)}
    for now in (100.0, 105.0):
        metrics.receive_shortfalls(there, now)
    assert value("pool_short_seconds", {"pool": "p"}) == 5 and value("pool_short_seconds", {"pool": "q"}) == 0
    metrics.receive_plans({"q": PoolPlan(1, 0, 1)}, leads=False)
    metrics.receive_shortfalls(there, 110.0)
    assert value("pool_short_seconds", {"pool": "p"}) is None
    assert value("pool_short_seconds", {"pool": "q"}) == 0


def test_a_replica_that_only_starts_has_not_come() -> None:
    metrics = ControllerMetrics()
    metrics.receive_plans({"p": PoolPlan(2, 0, 2)}, leads=False)
    starting = replica("starting")
    for now, crashing in ((100.0, [starting]), (130.0, []), (160.0, [starting])):
        metrics.receive_shortfalls({"p": ([replica(), *crashing], NONE_WAIT)}, now)
    assert metrics.registry.get_sample_value("pool_short_seconds", {"pool": "p"}) == 60


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"pods": 5}, "up"),
        ({"ready": 4}, "up"),
        ({"ready": 2}, "down"),
        ({"pods": 3}, "down"),
        ({"resting": "r"}, "rest"),
        ({"victims": ("v", "r")}, "victim"),
        ({"victims": ()}, "other"),
    ],
)
def test_a_decision_is_counted_by_what_it_is(change: dict[str, Any], kind: str) -> None:
    old = PoolPlan(3, 1, 4, victims=(ReplicaId("v"),))
    assert decision_kind(old, msgspec.structs.replace(old, **change)) == kind
    assert decision_kind(None, old) == "other"
