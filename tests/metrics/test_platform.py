"""A running platform exports exactly the metrics of the list."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from dashboards import rules
from stream_fabric.process import metric_names as listed
from stream_fabric.process.metric_names import METRICS, Role
from tests.metrics.conftest import KV_BYTES, Observed, fetch
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

OURS = {name for metric in METRICS.values() for name in metric.series}
ROLES: tuple[Role, ...] = ("gateway", "agent", "controller", "telemetry")


async def shown(observed: Observed, role: Role) -> dict[str, list[dict[str, str]]]:
    """Sample names → their label sets, of all of a role's processes."""
    found: dict[str, list[dict[str, str]]] = {}
    for url in observed.targets()[role]:
        for family in parse(await fetch(url)):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


@pytest.mark.parametrize("role", ROLES)
async def test_every_metric_of_the_list_is_shown_and_none_besides(observed: Observed, role: Role) -> None:
    wanted = {name for metric in listed.metrics_of(role) if not metric.only for name in metric.series}

    async def whole() -> dict[str, list[dict[str, str]]] | None:
        seen = await shown(observed, role)
        return seen if wanted <= set(seen) else None

    try:
        seen = await eventually(whole, f"all metrics of a {role}")
    except AssertionError:
        raise AssertionError(f"not shown: {wanted - set(await shown(observed, role))}") from None
    ours = {name for name in seen if not name.startswith("vllm:")}
    assert ours <= {name for metric in listed.metrics_of(role) for name in metric.series}
    for metric in listed.metrics_of(role):
        for name in metric.series:
            for labels in seen.get(name, []):
                assert set(labels) - {"le"} == set(metric.labels), name


async def test_the_kv_cache_is_told_in_bytes_where_a_tokens_size_is_known(observed: Observed) -> None:
    text = await fetch(observed.targets()["agent"][0])
    values = {s.name: s.value for family in parse(text) for s in family.samples}
    assert values["kv_cache_total_bytes"] == values["kv_cache_total_tokens"] * KV_BYTES > 0


async def test_agents_answer_in_plain_text_whatever_is_asked_for(observed: Observed) -> None:
    """Their engine's names have colons, which the writer of OpenMetrics turns into underscores."""
    text = await fetch(observed.targets()["agent"][0], "application/openmetrics-text;version=1.0.0")
    assert "\nvllm:num_requests_running{" in text and "# EOF" not in text


async def test_a_gateway_counts_what_its_readers_were_shown(observed: Observed) -> None:
    reads: dict[tuple[str, str], float] = {}
    for url in observed.targets()["gateway"]:
        for family in parse(await fetch(url)):
            for sample in family.samples:
                if sample.name == "reads_total":
                    key = sample.labels["role"], sample.labels["ended"]
                    reads[key] = reads.get(key, 0) + sample.value
    rounds = reads["refused", "refused"]
    assert rounds >= 1
    assert reads["created", "completed"] == 13 * rounds
    assert reads["resumed", "completed"] == rounds


NOT_SEEN = {("moderation_checks_total", "outcome", "failed"), ("structured_replies_total", "result", "invalid")}
"""Label values of alerts that this platform does not show: it has no moderation, and its replies fit their schema."""


async def test_the_label_values_that_alerts_ask_for_are_shown(observed: Observed) -> None:
    asked = {
        (name, label, value)
        for alert in rules.ALERTS
        for name, selector in re.findall(r"([a-z_:][a-z0-9_:]*)\{([^}]*)\}", alert.expr)
        for label, values in re.findall(r'([a-z_]+)=~?"([^"]*)"', selector)
        for value in values.split("|")
        if name in OURS and label != "le"
    }
    assert len(asked) > 10

    async def all_shown() -> bool:
        seen = {
            (name, label, value)
            for role in ROLES
            for name, series in (await shown(observed, role)).items()
            for labels in series
            for label, value in labels.items()
        }
        missing.clear()
        missing.update(asked - seen - NOT_SEEN)
        return not missing

    missing: set[tuple[str, str, str]] = set()
    try:
        await eventually(all_shown, "the label values of all alerts")
    except AssertionError:
        raise AssertionError(f"no process shows {missing}") from None
