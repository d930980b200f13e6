"""The judgement of ``bench.tokens`` and the drawing of its figures."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import plot, tokens


def samples(**changes: float) -> tokens.Samples:
    """Figures that keep every bound. ``changes``: of the platform, by name."""
    made: tokens.Samples = defaultdict(list)
    for phase in ("saturated", "closed loop", "in step", "out of step", "arrivals"):
        for who, gateway_us in (("nginx", 20.0), ("sse", 16.0), ("ws", 18.0)):
            made[who, phase, "gateway_us"] = [gateway_us]
        for what, value in (("redis_us", 15.0), ("agent_us", 25.0), ("tokens_per_s", 5000.0)):
            made["sse", phase, what] = [changes.get(what, value)]
        for name in ("delay", "itl", "ttft"):
            for part in ("p50", "p99"):
                what = f"added_{name}_us_{part}"
                made["sse", phase, what] = [changes.get(what, 900.0)]
    for process in ("gateway", "agent", "redis"):
        made["sse", "short", f"{process}_ms"] = [changes.get(f"{process}_ms", 0.1)]
    made["nginx", "short", "gateway_ms"] = [0.08]
    return made


BOUNDS = tokens.parse([])[1]


def exceeded(of: tokens.Samples, held: dict[str, dict[str, float]] | None = None) -> list[str]:
    return [check.what for check in tokens.checks_of(of, held or {}, BOUNDS) if not check.ok]


def test_every_bound_is_judged() -> None:
    held = {kind: {"rss_kib": 9.0} for kind in ("nginx", "sse", "ws")}
    checks = tokens.checks_of(samples(), held, BOUNDS)
    assert all(check.ok for check in checks)
    assert len(checks) == len(BOUNDS) - 1 + len(tokens.PHASES), "the WebSocket's is judged in each phase"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"added_delay_us_p50": 2001.0}, ["delay p50 added, ms"]),
        ({"added_itl_us_p99": 3001.0}, ["itl p99 added, ms"]),
        ({"added_ttft_us_p99": 6001.0}, ["ttft p99 added, ms"]),
        ({"agent_us": 31.0}, ["in step agent, x nginx"]),
        ({"redis_us": 45.0}, ["out of step path, x nginx"]),
        ({"redis_ms": 0.15}, ["short redis, x nginx"]),
    ],
)
def test_a_figure_beyond_its_bound_is_named(change: dict[str, float], names: list[str]) -> None:
    assert exceeded(samples(**change)) == names


def test_memory_beyond_its_bound_is_named() -> None:
    assert exceeded(samples(), {"sse": {"rss_kib": 12.5}, "ws": {"rss_kib": 19.0}}) == ["sse KiB an open stream"]


def test_a_bound_of_another_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tokens.parse(["--bound", "speed=1"])
    assert "the bounds are" in capsys.readouterr().err
    assert tokens.parse(["--bound", "delay p50=1.5"])[1]["delay p50"] == 1.5


def test_the_plot_has_two_bars_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, delay in (("before", 9000.0), ("after", 1800.0)):
        found = {" / ".join(key): values for key, values in samples(added_delay_us_p50=delay).items()}
        (tmp_path / name).write_text(json.dumps({"samples": found}))
    out = tmp_path / "plot.svg"
    files = [str(tmp_path / name) for name in ("before", "after")]
    assert plot.main(["--before", files[0], "--after", files[1], "--out", str(out), "--rows"]) == 0
    bars = list(ElementTree.parse(out).iter("{http://www.w3.org/2000/svg}rect"))[1:]
    assert len(bars) == 2 * len(plot.ROWS)
    assert [float(bar.attrib["width"]) for bar in bars[:2]] == [plot.BAR, pytest.approx(plot.BAR / 5)]
    assert "| 9.00 | 1.80" in " ".join(capsys.readouterr().out.split())
