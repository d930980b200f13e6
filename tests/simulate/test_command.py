"""``stream-gw capacity`` and ``stream-gw simulate``, as they are typed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inference.simulate.traces import FILES, traces_folder
from stream_gw.cli.main import main
from tests.simulate.traffic import PROFILE, as_csv, chats

PAGE = Path(__file__).parents[2] / "docs" / "capacity.md"
Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """In a folder with a trace, a profile and a pools file: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    as_csv(chats(120, 3.0), Path("t.csv"))
    Path("p.toml").write_text(PROFILE)
    Path("pools.toml").write_text("[pool.a]\ncold_start_s = 30\nreplicas_max = 9\n[pool.b]\n")

    def run(*flags: str) -> tuple[int, str, str]:
        try:
            code = main(list(flags))
        except SystemExit as ended:
            code = int(ended.code or 0)
        return (code, *capsys.readouterr())

    return run


def test_capacity_shows_its_arithmetic_and_tells_the_same_as_json(typed: Typed) -> None:
    flags = ("capacity", "--trace", "t.csv", "--profile", "p.toml", "--spare", "2")
    code, out, err = typed(*flags)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 118
    found = json.loads(typed(*flags, "--json")[1])
    assert found["replicas"] == found["serving"] + 2 >= 3
    assert found["gpus"] == 2 * found["replicas"]
    assert [str(found["replicas"]), str(found["gpus"])] in [line.split()[:2] for line in out.splitlines()]
    assert found["reserve"] == [] and "not longer than a cold start" in out
    told = " ".join(out.split())
    for lines in found["arithmetic"].values():
        assert all(line in told for line in lines)
    assert set(found["arithmetic"]) == {"workload", "replica", "fleet", "at the peak", "money"}


def test_capacity_shows_what_a_warm_reserve_covers_and_costs(typed: Typed) -> None:
    """Two quiet hours with a burst each half-hour, which no replica that was asked for then can meet."""
    quiet = [request.at_s for request in chats(1440, 0.2)]
    bursts = [1800 * number + 5 + k / 8 for number in range(1, 4) for k in range(400)]
    lines = ({"timestamp": int(at_s * 1000), "input_length": 500, "output_length": 100} for at_s in quiet + bursts)
    Path("t.jsonl").write_text("\n".join(map(json.dumps, sorted(lines, key=lambda line: line["timestamp"]))))
    flags = ("capacity", "--trace", "t.jsonl", "--profile", "p.toml", "--cold-start-s", "240")
    curve = json.loads(typed(*flags, "--json")[1])["reserve"]
    assert [row["warm"] for row in curve] == sorted({row["warm"] for row in curve})
    none, most = curve[0], curve[-1]
    # A burst is ahead in 4 of 30 minutes: a reserve for half of the time is none
    assert (none["warm"], none["jump_share"], none["rise_per_s"]) == (0, 0.5, 0.0)
    assert most["jump_share"] == 1 and most["rise_per_s"] == pytest.approx(400 / 60, rel=0.1)
    assert none["beyond_share"] > 0.1 and most["beyond_share"] == 0
    assert most["gpus"] == 2 * most["warm"] and most["dollars_per_month"] > none["dollars_per_month"] == 0
    out = typed(*flags)[1]
    assert out.splitlines()[-1].split()[:3] == ["1", f"{most['rise_per_s']:,.2f}/s", str(most["warm"])]
    # A replica that starts within a minute needs less
    soon = json.loads(typed(*flags[:-1], "30", "--json")[1])["reserve"]
    assert soon[0]["jump_share"] > none["jump_share"]
    code, _, err = typed(
        "capacity", "--rate", "5", "--prompt-tokens", "9", "--output-tokens", "9", "--cold-start-s", "3"
    )
    assert code == 2 and "--cold-start-s is for --trace" in err


def test_capacity_from_rates_and_lengths(typed: Typed) -> None:
    lengths = ("--prompt-tokens", "p50=600,p95=3000", "--output-tokens", "200")
    code, out, _ = typed("capacity", "--rate", "40", "--peak-to-mean", "2", *lengths, "--gpu-hour", "3", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["requests_per_s"] == 80
    assert found["output_tokens_per_s"] == pytest.approx(16_000)
    assert found["dollars_per_month"] == pytest.approx(found["gpus"] * 3 * 730)


def test_simulate_compares_policies_and_writes_what_it_is_asked_to(typed: Typed) -> None:
    code, out, err = typed(
        "simulate", "--trace", "t.csv", "--policy", "ours,waiting", "--policy", "fixed:2", "--profile", "p.toml",
        "--pools-file", "pools.toml", "--pool", "a", "--step", "3x@50%-75%", "--kill", "30,50%", "--csv", "s.csv",
        "--timeline", "t2.csv", "--html", "o.html", "--ttft-s", "2", "--ttft-s-per-1k", "1",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "30 s from asking for a replica" in out, "the pool's"
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["ours", "waiting", "fixed:2"]
    assert len(Path("s.csv").read_text().splitlines()) == 4
    assert Path("t2.csv").read_text().startswith("policy,at_s,arrived,")
    assert Path("o.html").read_text().startswith("<!doctype html>")


def test_simulate_tells_json(typed: Typed) -> None:
    code, out, _ = typed("simulate", "--trace", "t.csv", "--policy", "fixed:1,oracle", "--profile", "p.toml", "--json")
    found = json.loads(out)
    assert code == 0
    assert [one["policy"] for one in found] == ["fixed:1", "oracle"]
    assert found[1]["slo"] > found[0]["slo"]


def test_simulate_compares_each_policy_without_and_with_a_batch_host(typed: Typed) -> None:
    flags = shlex.split(
        "simulate --trace t.csv --policy fixed:1,fixed:2 --profile p.toml --batch-share 0.5 --batch-host 2 "
        "--host-gpu-hour 1 --reclaim 50%-60%,70%"
    )
    code, out, err = typed(*flags)
    assert (code, err) == (0, "")
    told = " ".join(out.split())
    assert "50% of the requests are of tier batch, the others interactive; batch host: 2 such replicas, $1 a" in told
    assert re.search(r"one is taken away at \d+ s and may start again at \d+ s; one is taken away at \d+ s", told)
    assert {"interactive SLO", "host GPU hours", "host dollars", "host took"} <= set(re.split(" {2,}", out))
    found = json.loads(typed(*flags, "--json")[1])
    assert [one["policy"] for one in found] == ["fixed:1", "fixed:1 + host", "fixed:2", "fixed:2 + host"]
    assert [one["reclaims"] for one in found] == [0, 2, 0, 2]
    assert [one["hosted"] > 0 for one in found] == [False, True] * 2
    assert found[1]["host_dollars"] == pytest.approx(found[1]["host_gpu_h"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("simulate --trace t.csv --policy best", "no policy 'best'; there are ours, ours:known, hpa,"),
        ("simulate --trace t.csv --policy fixed:0", "no policy 'fixed:0'"),
        ("simulate --trace none.csv --policy ours", "none.csv"),
        ("simulate --trace empty.csv --policy ours", "empty.csv: it has no request"),
        ("simulate --trace bad.csv --policy ours", "bad.csv: line 3"),
        ("simulate --trace t.csv", "--policy"),
        ("simulate --policy ours", "--trace"),
        ("simulate --trace t.csv --policy ours --profile none.toml", "none.toml"),
        ("simulate --trace t.csv --policy ours --profile pools.toml", "pools.toml: Object"),
        ("simulate --trace t.csv --policy ours --pools-file pools.toml", "name one with --pool; there are a, b"),
        ("simulate --trace t.csv --policy ours --pools-file pools.toml --pool c", "no pool 'c'; there are a, b"),
        ("simulate --trace t.csv --policy ours --pools-file p.toml", "p.toml"),
        ("simulate --trace t.csv --policy ours --pool a", "--pool is for --pools-file"),
        ("simulate --trace t.csv --policy ours --speed 0", "--speed must be more than 0"),
        ("simulate --trace t.csv --policy ours --speed nan", "--speed must be more than 0"),
        ("simulate --trace t.csv --policy ours --step 5", "'5' is no step"),
        ("simulate --trace t.csv --policy ours --kill noon", "'noon' is no moment"),
        ("simulate --trace t.csv --policy ours --kill 1h", "after the last request"),
        ("simulate --trace t.csv --policy ours --batch-host 2", "--batch-host needs --batch-share"),
        ("simulate --trace t.csv --policy ours --batch-share 2", "--batch-share must be from 0 to 1, got 2"),
        ("simulate --trace t.csv --policy ours --batch-share nan", "--batch-share must be from 0 to 1, got nan"),
        ("simulate --trace t.csv --policy ours --batch-share 1 --batch-host -1", "--batch-host must be from 0 to 10,"),
        ("simulate --trace t.csv --policy ours --reclaim 50%", "--reclaim is for --batch-host"),
        (
            "simulate --trace t.csv --policy ours --batch-share 1 --batch-host 1 --reclaim 60%-30%",
            "'60%-30%': the replica comes back before it is taken away",
        ),
        ("simulate --trace t.csv --policy ours --begin 99999999", "--begin must be from 0 to 10,000 replicas"),
        ("simulate --trace t.csv --policy ours --cold-start-s -1", "--cold-start-s must be 0 or more"),
        ("simulate --trace t.csv --policy ours --fill 1.5", "--fill must be more than 0"),
        ("simulate --trace t.csv --policy ours --html none/o.html", "none/o.html"),
        ("simulate --trace t.csv --policy ours --csv ./t.csv", "--csv would overwrite t.csv, the file of --trace"),
        ("simulate --trace t.csv --policy ours --profile p.toml --html p.toml", "the file of --profile"),
        ("simulate --trace t.csv --policy ours --csv new --timeline new", "--timeline would overwrite new"),
        ("simulate --trace ages.jsonl --policy ours", "ages.jsonl: its requests last 19,676 days, and may last 366"),
        ("capacity --trace ages.jsonl", "19,676 days, is after request 1 in order"),
        ("capacity --trace t.csv --speed 1e-9", "and may last 366"),
        ("capacity", "--rate"),
        ("capacity --rate 5", "--rate needs --prompt-tokens"),
        ("capacity --rate 5 --prompt-tokens x --output-tokens 5", "--prompt-tokens: 'x' is no number"),
        ("capacity --rate 0 --prompt-tokens 5 --output-tokens 5", "--rate must be more than 0"),
        ("capacity --rate 1e308 --prompt-tokens 5 --output-tokens 5", "--rate must be more than 0 and at most 1e9"),
        ("capacity --rate 5 --prompt-tokens p1=1,p2=1e9 --output-tokens 5", "--prompt-tokens: p1=1,p2=1e9 spread too"),
        ("capacity --rate 5 --prompt-tokens 5 --output-tokens 5 --profile fast.toml", "fast.toml: Expected `float` <="),
        ("capacity --rate 5 --prompt-tokens 5 --output-tokens 5 --fill 2", "utilisation must be"),
        ("capacity --rate 5 --prompt-tokens 5 --output-tokens 5 --speed 2", "--speed is for --trace"),
        ("capacity --rate 5 --prompt-tokens 5 --output-tokens 5 --itl-ms 1", "one sequence alone"),
        ("capacity --rate 5 --trace t.csv", "not allowed with"),
        ("capacity --trace t.csv --prompt-tokens 5", "--prompt-tokens is for --rate"),
        ("capacity --trace t.csv --window-s 900", "less than one window of 900 s; give a longer trace or a shorter -"),
        ("capacity --trace t.csv --window-s 900", "t.csv lasts"),
        ("capacity --trace bad.csv", "bad.csv: line 3"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(typed: Typed, flags: str, says: str) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    Path("empty.csv").write_text(head)
    Path("fast.toml").write_text("prefill_tokens_per_s = 1\nslots = 1\n[decode_tokens_per_s]\n1 = inf\n")
    line = '{"timestamp": %d, "input_length": 10, "output_length": 5}\n'
    Path("ages.jsonl").write_text("".join(line % ms for ms in (0, 1_700_000_000_000, 1_700_000_120_000)))
    Path("bad.csv").write_text(head + "2023-11-16 18:00:00,1,2\n2023-11-16 18:00:01,one,2\n")
    code, out, err = typed(*flags.split())
    assert (code, out) == (1 if says.startswith("none") else 2, ""), "1: a file cannot be used"
    assert says in "\n".join(err.splitlines()[-2:])


def test_a_seed_is_the_same_day_in_every_process(typed: Typed) -> None:
    flags = [
        "--trace",
        "t.csv",
        "--policy",
        "ours,hpa",
        "--profile",
        "p.toml",
        "--cold-start-s",
        "20",
        "--kill",
        "40",
        "--json",
    ]
    said = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "stream_gw.cli", "simulate", *flags],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        said.append(done.stdout)
    assert said[0] == said[1]
    assert json.loads(said[0])[0]["rescued"] > 0


def test_other_commands_do_not_load_the_simulation() -> None:
    code = "import sys, stream_gw.cli.main; print([m for m in sys.modules if m.startswith('inference.simulate.')])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]"


def test_the_capacity_page_shows_what_the_command_says(typed: Typed) -> None:
    profile, command, output = re.findall(r"```(?:toml)?\n(.*?)```", PAGE.read_text(), re.DOTALL)[:3]
    Path("h100x4.toml").write_text(profile)
    name, *flags = shlex.split(command.replace("\\\n", " "))
    assert name == "stream-gw"
    assert typed(*flags) == (0, output, "")


def test_the_published_trace_in_the_arithmetic(typed: Typed) -> None:
    path = traces_folder(None) / FILES["azure"]
    if not path.is_file():
        pytest.skip(f"no trace at {path}")
    code, out, _ = typed("capacity", "--trace", str(path), "--profile", "p.toml", "--json")
    assert code == 0
    assert 11 <= json.loads(out)["serving"] <= 18
