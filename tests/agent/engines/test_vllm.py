"""How vLLM is started, watched and ended, on a stand-in that does what it is told; what its metrics and events say.

``tests/vllm`` holds the real one to the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from inference.engines import kv_events
from inference.engines.kv_events import KvEvents, KvLedger
from inference.engines.prometheus import RestartingCounter, VllmMetrics, read_metrics
from inference.engines.vllm import RestartPolicy, VllmEngine
from inference.engines.vllm_flags import VllmOptions, flags_of
from inference.engines.warm_up import warm_up
from stream_fabric.errors import EngineFailed
from stream_fabric.pool.records import EngineRequest
from stream_fabric.ports import FrameSink
from stream_fabric.process.backoff import BackoffPolicy
from stream_fabric.stream.frames import ErrorInfo
from stream_fabric.stream.ids import StreamId
from tests.agent.engines.recorder import Recorder, completion, stream_id
from tests.gateway.processes import alive, need_redis, run_cli
from tests.support.waiting import eventually
from tests.vllm import fake
from tests.vllm.real import children, starting_up, up

QUICK = RestartPolicy(BackoffPolicy(0.01, 0.05), starts_max=3, term_s=0.5)

# --- flags -----------------------------------------------------------------------------------------------------


def flags(*given: str, **options: Any) -> tuple[list[str], int]:
    return flags_of(VllmOptions("m", given, **options))


def test_what_we_pass_gives_way_to_what_the_user_says() -> None:
    ours, slots = flags(slots=64)
    assert ours == [
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        "--enable-per-request-metrics",
        "--max-num-seqs",
        "64",
    ]
    assert slots == 64
    theirs, slots = flags("--no-enable-prefix-caching", "--max_num_seqs=8", "--max-model-len", "4096")
    assert theirs == [
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        "--enable-per-request-metrics",
        "--no-enable-prefix-caching",
        "--max_num_seqs=8",
        "--max-model-len",
        "4096",
    ]
    assert slots == 8


@pytest.mark.parametrize(
    "given", ["--disable-log-stats", "--no-enable-per-request-metrics", "--enable_per_request_metrics"]
)
def test_a_requests_own_times_are_not_asked_for_where_vllm_could_not_tell_them_or_the_user_says(given: str) -> None:
    ours, _ = flags(given)
    assert "--enable-per-request-metrics" not in ours


def test_a_default_that_is_turned_off_is_told(caplog: pytest.LogCaptureFixture) -> None:
    flags("--no-enable-prefix-caching")
    assert "--no-enable-prefix-caching" in caplog.text


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        (["--port", "1"], {}, "--port.*free port"),
        (["--host=0.0.0.0"], {}, "--host.*loopback"),
        (["--model", "x"], {}, "--model of stream-gw"),
        (["other-model"], {}, "other-model.*--model"),
        (["--api-key", "k"], {}, "--upstream-api-key"),
        (["--max-num-seqs", "many"], {}, "--max-num-seqs.*many"),
        (["--max-num-seqs"], {}, "--max-num-seqs"),
        (["--kv-events-config", "{}"], {"kv_events": True}, "--kv-events"),
        (["-dp", "2"], {"kv_events": True}, "--data-parallel-size"),
    ],
)
def test_a_clash_is_told_with_what_to_do(given: list[str], options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        flags(*given, **options)


def test_a_vllm_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="STREAM_GW_VLLM_PYTHON"):
        VllmEngine(VllmOptions("m"))
    with pytest.raises(ValueError, match="/nowhere/python"):
        VllmEngine(VllmOptions("m", python="/nowhere/python"))


# --- the process -----------------------------------------------------------------------------------------------

Make = Callable[..., VllmEngine]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes an engine on the stand-in. Whatever the test does, no process of it is left."""
    engines: list[VllmEngine] = []

    def new(mode: str = "ok", policy: RestartPolicy = QUICK, **options: Any) -> VllmEngine:
        engine = VllmEngine(VllmOptions("m", python=fake.command(tmp_path, mode), **options), policy)
        engines.append(engine)
        return engine

    yield new
    for engine in engines:
        await engine.close()
    assert not [pid for pid in fake.pids(tmp_path) if alive(pid)]


def gone(pids: list[int]) -> bool:
    return not any(map(alive, pids))


async def begun(tmp_path: Path) -> None:
    await eventually(lambda: fake.calls(tmp_path), "vLLM to be started", 40)


async def streaming(engine: VllmEngine) -> Recorder:
    sink = Recorder()
    engine.submit(completion(1, max_tokens=10_000), sink)
    await eventually(lambda: sink.tokens() >= 2)
    return sink


async def ask(engine: VllmEngine, number: int) -> Recorder:
    sink = Recorder()
    engine.submit(completion(number, max_tokens=3), sink)
    return await sink.wait()


async def test_start_is_over_when_a_token_came_out(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_GW_REDIS_URL", "redis://:secret@db:1/0")
    engine = make(flags=("--max-num-seqs", "7"), api_key="own")
    assert not engine.load().ready
    assert list(await engine.start()) == ["fake"]
    await eventually(lambda: engine.load().prefix_queries_tokens == 20, "the warm-up's prompts")
    load = engine.load()
    assert (load.ready, load.slots) == (True, 7)
    (call,) = fake.calls(tmp_path)
    assert call["pid"] == engine.pid
    assert call["argv"][:4] == ["-m", "vllm.entrypoints.cli.main", "serve", "m"]
    assert call["env"]["VLLM_API_KEY"] == "own"
    assert call["env"]["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0", "an allowed host may redirect to any other"
    assert "secret" not in str(call["env"])
    sink = Recorder()
    engine.submit(completion(1, max_tokens=3), sink)
    assert (await sink.wait()).body() == "0 1 2 "


async def test_the_plugin_can_connect_at_its_first_try(make: Make, tmp_path: Path) -> None:
    """It tries again only after half a second, which would be a part of every start."""
    engine = make()
    await engine.start()
    (call,) = fake.calls(tmp_path)
    assert call["agent_listens"]


async def test_a_start_that_compiles_compiles_what_logprobs_need(make: Make, tmp_path: Path) -> None:
    await make().start()
    assert fake.logprobs(tmp_path) == [None, 1]


@pytest.mark.parametrize(("status", "warnings"), [(400, 0), (500, 1)])
async def test_a_model_that_gives_no_logprobs_serves_all_the_same(
    caplog: pytest.LogCaptureFixture, status: int, warnings: int
) -> None:
    aborted: list[StreamId] = []

    def submit(request: EngineRequest, sink: FrameSink) -> None:
        if "logprobs" in msgspec.json.decode(request.body):
            sink.end("failed", ErrorInfo("engine_error", "no logprobs today", http_status=status))
        else:
            sink.end("completed")

    await warm_up(submit, aborted.append, "m", with_logprobs=True)
    assert len(aborted) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings


async def test_an_eager_start_compiles_nothing(make: Make, tmp_path: Path) -> None:
    await make(flags=("--enforce_eager",)).start()
    assert fake.logprobs(tmp_path) == [None]


@pytest.mark.parametrize(
    ("mode", "told"), [("die", r"ended with exit code 3.*\n.*mouth is too small"), ("toothless", "no tokens today")]
)
async def test_a_start_that_fails_tells_why_and_leaves_nothing(
    make: Make, tmp_path: Path, mode: str, told: str
) -> None:
    engine = make(mode)
    with pytest.raises(EngineFailed, match=f"(?s){told}"):
        await engine.start()
    assert gone(fake.pids(tmp_path))
    assert len(fake.calls(tmp_path)) == 1


async def test_a_start_that_takes_too_long_has_failed(make: Make, tmp_path: Path) -> None:
    engine = make("hang", start_s=1.0)
    with pytest.raises(EngineFailed, match=r"(?s)not ready within 1 s.*this is no model"):
        await engine.start()
    assert gone(fake.pids(tmp_path))


async def test_a_start_that_is_given_up_leaves_nothing(make: Make, tmp_path: Path) -> None:
    engine = make("hang")
    starting = asyncio.create_task(engine.start())
    await eventually(lambda: fake.calls(tmp_path))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await engine.close()
    assert gone(fake.pids(tmp_path))


async def test_after_its_death_requests_end_at_once_and_it_is_started_again(make: Make, tmp_path: Path) -> None:
    engine = make()
    await engine.start()
    sink = await streaming(engine)
    await eventually(lambda: engine.load().prefix_queries_tokens == 30)
    first = engine.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    killed = time.monotonic()
    await sink.ended.wait()
    assert time.monotonic() - killed < 0.5
    assert sink.error is not None
    assert (sink.status, sink.error.code, sink.error.retriable) == ("failed", "engine_lost", True)
    await eventually(lambda: not engine.load().ready)
    await eventually(lambda: engine.load().ready)
    assert engine.pid != first
    assert gone(fake.pids(tmp_path)[:2]), "its engine process went with it"
    again = Recorder()
    engine.submit(completion(2, max_tokens=3), again)
    assert (await again.wait()).status == "completed"
    await eventually(lambda: engine.load().prefix_queries_tokens == 60, "what was counted before and since")
    assert engine.load().kv_clears == 1


async def test_what_comes_while_it_is_down_may_be_tried_again(make: Make, tmp_path: Path) -> None:
    engine = make()
    await engine.start()
    fake.set_mode(tmp_path, "hang")
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    await eventually(lambda: len(fake.calls(tmp_path)) == 2)
    assert not engine.load().ready
    sink = Recorder()
    engine.submit(completion(1), sink)
    engine.abort(stream_id(1))
    assert sink.error is not None
    assert (sink.error.code, sink.error.retriable) == ("engine_lost", True)


async def test_who_stops_while_a_process_is_made_waits_for_nothing_and_leaves_none(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine vLLM runs before this process has connected its pipes."""
    loop, busy = asyncio.get_running_loop(), asyncio.Event()
    connect = loop.connect_read_pipe

    async def late(*args: Any) -> Any:
        await busy.wait()
        return await connect(*args)

    monkeypatch.setattr(loop, "connect_read_pipe", late)
    starting = asyncio.create_task(make().start())
    await begun(tmp_path)
    starting.cancel()
    await asyncio.sleep(0.1)
    busy.set()
    await asyncio.wait([starting], timeout=15)
    assert starting.cancelled()
    await eventually(lambda: gone(fake.pids(tmp_path)), "its processes to end")


async def test_it_is_given_up_after_so_many_starts_in_a_row(make: Make, tmp_path: Path) -> None:
    engine = make()
    await engine.start()
    serving = asyncio.create_task(engine.serving())
    fake.set_mode(tmp_path, "die")
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match=r"(?s)3 starts in a row.*mouth is too small"):
        async with asyncio.timeout(20):
            await serving
    assert len(fake.calls(tmp_path)) == 1 + QUICK.starts_max
    assert not engine.load().ready


@pytest.mark.platform
async def test_one_that_answers_nothing_is_killed_and_started_again(make: Make) -> None:
    engine = make(policy=msgspec.structs.replace(QUICK, silent_s=1.5))
    await engine.start()
    first = engine.pid
    sink = Recorder()
    engine.submit(completion(1, "go deaf", max_tokens=1), sink)
    await sink.wait()
    assert sink.error is not None
    assert (sink.error.code, sink.error.retriable) == ("engine_lost", True)
    await eventually(lambda: engine.load().ready)
    assert engine.pid != first


async def test_one_whose_engine_died_is_not_waited_for(make: Make) -> None:
    engine = make()
    await engine.start()
    first = engine.pid
    sink = Recorder()
    engine.submit(completion(1, "go mad", max_tokens=10_000), sink)
    await sink.wait()
    assert sink.error is not None
    assert (sink.error.code, sink.error.retriable) == ("engine_lost", True)
    assert "engine died" in sink.error.message
    await eventually(lambda: engine.load().ready)
    assert engine.pid != first


async def test_a_vllm_that_knows_no_times_is_started_without_them(tmp_path: Path, make: Make) -> None:
    engine = make()
    fake.set_mode(tmp_path, "old")
    assert await engine.start() == ["fake"]
    first, second = fake.calls(tmp_path)
    assert "--enable-per-request-metrics" in first["argv"]
    assert "--enable-per-request-metrics" not in second["argv"]
    sink = Recorder()
    engine.submit(completion(1, max_tokens=3), sink)
    assert ((await sink.wait()).status, sink.own) == ("completed", None)


async def test_tokens_come_by_the_plugin(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/own/path")
    caplog.set_level("INFO")
    engine = make(flags=("--middleware", "users.own"))
    await engine.start()
    (call,) = fake.calls(tmp_path)
    assert call["argv"][-4:] == ["--middleware", "users.own", "--middleware", "stream_gw_steps.Steps"]
    assert call["env"]["PYTHONPATH"].split(":")[1:] == ["/own/path"]
    assert sorted(path.name for path in Path(call["env"]["PYTHONPATH"].partition(":")[0]).glob("*.py")) == [
        "__init__.py",
        "stream_gw_budget.py",
        "stream_gw_scheduler.py",
        "stream_gw_steps.py",
    ]
    assert "connected to the step socket" in caplog.text
    sink = await streaming(engine)
    socket = Path(call["env"]["STREAM_GW_STEPS"])
    assert socket.is_socket()
    assert socket.parent.stat().st_mode & 0o777 == 0o700, "nobody else may take vLLM's place"
    engine.abort(stream_id(1))
    calls = sink.calls
    assert (await ask(engine, 2)).status == "completed"
    assert sink.calls == calls
    await engine.close()
    assert not socket.parent.exists()


async def test_without_the_plugin_tokens_come_by_http(make: Make, tmp_path: Path) -> None:
    engine = make(steps="off")
    await engine.start()
    (call,) = fake.calls(tmp_path)
    assert "--middleware" not in call["argv"]
    assert "STREAM_GW_STEPS" not in call["env"]
    assert (await ask(engine, 1)).status == "completed"


async def test_a_vllm_that_cannot_load_the_plugin_is_started_without_it(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make("closed")
    await engine.start()
    first, second = fake.calls(tmp_path)
    assert "--middleware" in first["argv"]
    assert "--middleware" not in second["argv"]
    assert "tokens come by HTTP" in caplog.text
    assert (await ask(engine, 1)).status == "completed"


async def test_an_objective_loads_the_scheduler_that_keeps_it(make: Make, tmp_path: Path) -> None:
    engine = make(itl_objective_s=0.05, steps="off")
    await engine.start()
    (call,) = fake.calls(tmp_path)
    assert call["argv"][-2:] == ["--scheduler-cls", "stream_gw_scheduler.make"]
    assert call["env"]["STREAM_GW_ITL_OBJECTIVE_S"] == "0.05"
    assert (Path(call["env"]["PYTHONPATH"].partition(":")[0]) / "stream_gw_scheduler.py").exists()
    assert engine.load().itl_objective_ms == 50
    folder = Path(call["env"]["STREAM_GW_BUDGET"]).parent
    await engine.close()
    assert not folder.exists()


async def test_a_model_whose_prompts_cannot_be_divided_keeps_no_objective(make: Make) -> None:
    engine = make("whole", itl_objective_s=0.05)
    await engine.start()
    assert engine.load().itl_objective_ms == 0


async def test_a_vllm_that_cannot_load_the_scheduler_is_started_without_it(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make("rigid", itl_objective_s=0.05)
    await engine.start()
    first, second = fake.calls(tmp_path)
    assert "--scheduler-cls" in first["argv"] and "--scheduler-cls" not in second["argv"]
    assert "its steps are not limited" in caplog.text
    assert engine.load().itl_objective_ms == 0
    assert (await ask(engine, 1)).status == "completed"


async def test_a_vllm_that_knows_them_tells_them(make: Make) -> None:
    engine = make()
    await engine.start()
    sink = Recorder()
    engine.submit(completion(1, max_tokens=3), sink)
    await sink.wait()
    assert sink.own == (0.25, 0.03)


async def test_a_model_that_makes_no_tokens_is_warmed_up_by_what_it_does(make: Make) -> None:
    engine = make("pooling")
    await engine.start()
    assert engine.load().ready


async def test_close_ends_the_deaf_within_bounds_and_returns_serving(make: Make, tmp_path: Path) -> None:
    engine = make("deaf")
    await engine.start()
    serving = asyncio.create_task(engine.serving())
    sink = await streaming(engine)
    began = time.monotonic()
    await engine.close()
    assert QUICK.term_s <= time.monotonic() - began < QUICK.term_s + 1.5
    await serving
    assert gone(fake.pids(tmp_path))
    assert sink.status is None
    await engine.close()


async def test_a_killed_guard_leaves_nothing_either(make: Make, tmp_path: Path) -> None:
    engine = make()
    await engine.start()
    (call,) = fake.calls(tmp_path)
    with open(f"/proc/{call['pid']}/stat") as stat:
        guard = int(stat.read().rpartition(")")[2].split()[1])
    os.kill(guard, signal.SIGKILL)
    await eventually(lambda: gone([call["pid"], call["engine"]]))
    await eventually(lambda: len(fake.calls(tmp_path)) == 2 and engine.load().ready)


@pytest.mark.parametrize("mode", ["ok", "deaf"])
async def test_a_killed_agent_leaves_nothing(tmp_path: Path, mode: str) -> None:
    code = (
        "import asyncio\nfrom inference.engines.vllm import *\n"
        f"async def main():\n    engine = VllmEngine(VllmOptions('m', python={fake.command(tmp_path, mode)!r}),"
        " RestartPolicy(term_s=0.5))\n    await engine.start()\n    print('ready', flush=True)\n"
        "    await engine.serving()\nasyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert await asyncio.to_thread(agent.stdout.readline) == b"ready\n"
        assert all(map(alive, fake.pids(tmp_path)))
        agent.kill()
    await eventually(lambda: gone(fake.pids(tmp_path)), "vLLM's processes to be gone", 5)


async def test_its_words_reach_our_log_with_their_level(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    await make().start()
    await eventually(lambda: any(r.levelname == "WARNING" and "no model" in r.message for r in caplog.records))


@pytest.mark.platform
async def test_from_the_command_line_flags_after_the_dashes_reach_vllm(tmp_path: Path) -> None:
    """Without a Redis the agent ends after the engine's start, and takes vLLM with it."""
    python = fake.command(tmp_path)
    command = [sys.executable, "-m", "stream_gw.cli", "agent", "--engine", "vllm", "--model", "m"]
    command += ["--vllm-python", python, "--redis-url", "redis://127.0.0.1:1/0", "--", "--rope-scaling", '{"a": 1}']
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "Redis" in ended.stderr
    (call,) = fake.calls(tmp_path)
    assert call["argv"][-4:-2] == ["--rope-scaling", '{"a": 1}'], shlex.join(call["argv"])
    assert gone(fake.pids(tmp_path))


async def test_sigterm_while_it_starts_ends_both(tmp_path: Path) -> None:
    python = fake.command(tmp_path, "hang")
    command = [sys.executable, "-m", "stream_gw.cli", "agent", "--engine", "vllm", "--model", "m"]
    with subprocess.Popen([*command, "--vllm-python", python], stderr=subprocess.PIPE, text=True) as agent:
        await begun(tmp_path)
        agent.terminate()
        _, said = await asyncio.to_thread(agent.communicate, timeout=60)
    assert agent.returncode == 0
    assert "Traceback" not in said
    assert gone(fake.pids(tmp_path))


# --- stream-gw up ----------------------------------------------------------------------------------------------


@pytest.mark.platform
async def test_up_starts_one_and_gives_it_what_follows_the_dashes(tmp_path: Path) -> None:
    need_redis()
    with up("m", fake.command(tmp_path), "--rope-scaling", '{"a": 1}') as running:
        (call,) = fake.calls(tmp_path)
        assert call["argv"][:2] == ["-m", "vllm.entrypoints.cli.main"]
        assert call["argv"][2:4] == ["serve", "m"]
        assert call["argv"][-4:-2] == ["--rope-scaling", '{"a": 1}']
        assert len(running.agents) == 1

        async def served() -> list[str]:  # a gateway looks once a second
            return [model["id"] for model in (await running.gate.ask("GET", "/v1/models")).json["data"]]

        assert await eventually(served) == ["fake"]
        running.process.terminate()
        assert await asyncio.to_thread(running.process.wait) == 0
        assert gone(fake.pids(tmp_path))


@pytest.mark.platform
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_up_that_is_told_to_end_while_a_model_loads_ends_everything(
    tmp_path: Path, number: signal.Signals
) -> None:
    need_redis()
    with starting_up("m", fake.command(tmp_path, "hang")) as process:
        await begun(tmp_path)
        started = children(process.pid)
        assert len(started) >= 4, "a Redis, an agent, its guard, its vLLM"
        process.send_signal(number)
        _, said = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 130
    assert said.startswith("stream-gw up: vLLM loads m, which may take minutes\n")
    assert "Traceback" not in said
    assert gone([*started, *fake.pids(tmp_path)])


@pytest.mark.platform
async def test_an_up_killed_while_a_model_loads_leaves_nothing(tmp_path: Path) -> None:
    need_redis()
    with starting_up("m", fake.command(tmp_path, "hang")) as process:
        await begun(tmp_path)
        started = children(process.pid)
        process.kill()
    await eventually(lambda: gone([*started, *fake.pids(tmp_path)]), "the end of all", 20)


@pytest.mark.platform
async def test_a_killed_up_leaves_nothing(tmp_path: Path) -> None:
    need_redis()
    with up("m", fake.command(tmp_path)) as running:
        started = running.children
        assert set(fake.pids(tmp_path)) < set(started)
        assert all(map(alive, started))
        running.process.kill()
        await eventually(lambda: gone(started), "the end of all", 20)


@pytest.mark.platform
async def test_ctrl_c_does_not_wait_for_what_nobody_reads(tmp_path: Path) -> None:
    """And nothing is left when ``up`` has returned."""
    need_redis()
    with up("m", fake.command(tmp_path)) as running:
        body = {"model": "fake", "prompt": "x", "max_tokens": 100_000, "stream": True, "background": True}
        async with running.gate.open("POST", "/v1/completions", body) as exchange:
            assert b'"text":"0 "' in await exchange.piece() + await exchange.piece()
        started = running.children
        began = time.monotonic()
        running.process.signal(signal.SIGINT)
        assert await asyncio.to_thread(running.process.wait) == 0
        assert time.monotonic() - began < 25, "its drain is 30 s"
        assert gone(started)


@pytest.mark.platform
async def test_up_whose_vllm_dies_at_its_start_says_its_last_words(tmp_path: Path) -> None:
    need_redis()
    with starting_up("m", fake.command(tmp_path, "die")) as process:
        _, said = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 1
    assert "the model's mouth is too small" in said
    end = "stream-gw up: replica0: vLLM ended with exit code 3 at its start; its last lines are above\n"
    assert said.endswith(end), said
    assert "Traceback" not in said
    assert gone(fake.pids(tmp_path))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--engine", "vllm"], "engine vllm needs the model's name or folder"),
        (["--engine", "vllm", "--model", "m"], "name the Python whose environment holds it with --vllm-python"),
        (["--engine", "vllm", "--model", "m", "--vllm-python", "/nowhere/python"], "'/nowhere/python' cannot be run"),
        (["--engine", "vllm", "--model", "m", "--", "--port", "1"], "--port cannot be passed to vLLM"),
        (["--", "--max-model-len", "4096"], "flags after -- are vLLM's, and the engine is sim"),
    ],
)
def test_what_up_cannot_do_with_vllm_is_told_before_anything_starts(
    tmp_path: Path, given: list[str], told: str
) -> None:
    (tmp_path / "bin").mkdir()
    ended = run_cli("up", *given, PATH=str(tmp_path / "bin"))
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("stream-gw up: ")
    assert told in line


# --- metrics -----------------------------------------------------------------------------------------------------

METRICS = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.5e+06
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.79e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1000.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 7.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100",kv_cache_size_tokens="None"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="100",kv_cache_size_tokens="1500"} 1.0
"""


def test_the_metrics_of_several_engines_are_one_reading() -> None:
    assert read_metrics(METRICS) == VllmMetrics(
        shown=True,
        running=4,
        waiting=2,
        kv_used_ratio=0.375,
        kv_capacity_tokens=3100,
        block_size=16,
        prefix_queries=1_500_000,
        prefix_hits=1000,
    )


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"python_info 1.0\n",
        b"<html>not found</html>",
        b"\xff\xfe",
        b"vllm:kv_cache_usage_perc{} NaN\nvllm:prefix_cache_hits_total +Inf\nvllm:prefix_cache_queries_total x\n",
        b'vllm:num_requests_waiting 1e300\nvllm:cache_config_info{kv_cache_size_tokens="%b"} 1\n' % (b"9" * 5000),
        b'vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1.0\n',
        b"vllm:cache_config_info 1.0\n",
    ],
)
def test_what_is_missing_or_unreadable_is_nothing(text: bytes) -> None:
    assert read_metrics(text) == VllmMetrics()


def test_a_counter_of_another_process_only_grows() -> None:
    rising = RestartingCounter()
    assert [(rising.receive(value), rising.total) for value in (5, 9, 2, 2, 4, 0)] == [
        (False, 5),
        (False, 9),
        (True, 11),
        (False, 11),
        (False, 13),
        (True, 13),
    ]


# --- KV events ---------------------------------------------------------------------------------------------------


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def stored(blocks: int, **more: Any) -> dict[str, Any]:
    about = {"parent_block_hash": None, "token_ids": [1] * 16 * blocks, "block_size": 16, "lora_id": None}
    return {"type": "BlockStored", "block_hashes": [b"h"] * blocks, "medium": "GPU", **about, **more}


def removed(blocks: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [b"h"] * blocks, "medium": "GPU", **more}


CLEARED = {"type": "AllBlocksCleared"}


def test_removed_blocks_are_evicted_tokens_and_a_clear_is_a_clear() -> None:
    ledger = KvLedger()
    assert ledger.receive(0, batch(stored(3), removed(2)))
    assert ledger.receive(1, batch(CLEARED, removed(1, group_idx=0), removed(5, group_idx=1)))
    assert ledger.receive(2, batch(removed(1, medium="CPU"), removed(4, medium=None)))
    assert (ledger.evicted_tokens, ledger.clears) == ((2 + 1 + 4) * 16, 1)


def test_each_batch_counts_once_and_in_its_turn() -> None:
    ledger = KvLedger()
    assert not ledger.receive(1, batch(removed(1)))
    assert ledger.receive(0, batch(stored(1)))
    assert ledger.receive(1, batch(removed(1)))
    assert ledger.receive(1, batch(removed(1)))
    assert (ledger.evicted_tokens, ledger.clears, ledger.next) == (16, 0, 2)
    ledger.skip_to(5)
    assert ledger.receive(5, batch(removed(1)))
    assert (ledger.evicted_tokens, ledger.clears) == (32, 1)


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0, [{"type": "BlocksMislaid"}]])])
def test_events_that_cannot_be_read_are_a_clear(payload: bytes) -> None:
    ledger = KvLedger()
    assert ledger.receive(0, payload)
    assert (ledger.clears, ledger.next) == (1, 1)


class Publisher:
    """vLLM's end of both sockets."""

    def __init__(self, config: str) -> None:
        self.config = json.loads(config)
        context = zmq.asyncio.Context.instance()
        self.events = context.socket(zmq.XPUB)  # as PUB, and hears who subscribes
        self.events.bind(self.config["endpoint"])
        self.replay = context.socket(zmq.ROUTER)
        self.replay.bind(self.config["replay_endpoint"])

    async def publish(self, seq: int, payload: bytes) -> None:
        await self.events.send_multipart([b"", seq.to_bytes(8, "big"), payload])

    async def asked_again(self) -> tuple[bytes, int]:
        async with asyncio.timeout(5):
            client, _, first = await self.replay.recv_multipart()
        return client, int.from_bytes(first, "big")

    async def send_again(self, client: bytes, seq: int, payload: bytes = b"") -> None:
        await self.replay.send_multipart([client, b"", b"", seq.to_bytes(8, "big", signed=True), payload])

    def close(self) -> None:
        self.events.close(linger=0)
        self.replay.close(linger=0)


@pytest.fixture
async def heard() -> AsyncIterator[tuple[KvEvents, Publisher]]:
    """A listener that has subscribed."""
    events = KvEvents()
    publisher = Publisher(events.listen())
    async with asyncio.timeout(5):
        assert await publisher.events.recv() == b"\x01"
    yield events, publisher
    events.close()
    publisher.close()


async def test_events_are_counted_over_the_lives_of_vllm(heard: tuple[KvEvents, Publisher]) -> None:
    events, publisher = heard
    assert publisher.config["enable_kv_cache_events"] is True
    await publisher.publish(0, batch(stored(2), removed(2), CLEARED))
    await eventually(lambda: (events.evicted_tokens, events.clears) == (32, 1))
    second = Publisher(events.listen())
    assert not Path(publisher.config["endpoint"].removeprefix("ipc://")).parent.exists()
    await second.events.recv()
    await second.publish(0, batch(stored(1), removed(1)))
    await eventually(lambda: (events.evicted_tokens, events.clears) == (48, 1))
    second.close()


async def test_a_gap_is_asked_for_again(heard: tuple[KvEvents, Publisher]) -> None:
    events, publisher = heard
    await publisher.publish(0, batch(stored(9)))
    await publisher.publish(3, batch(removed(4)))
    client, first = await publisher.asked_again()
    assert first == 1
    for seq, blocks in ((1, 1), (2, 2), (3, 4)):
        await publisher.send_again(client, seq, batch(removed(blocks)))
    await publisher.send_again(client, -1)
    await publisher.publish(4, batch(removed(1)))
    await eventually(lambda: events.evicted_tokens == (1 + 2 + 4 + 1) * 16)
    assert events.clears == 0


async def test_what_cannot_be_had_again_is_a_clear(heard: tuple[KvEvents, Publisher]) -> None:
    events, publisher = heard
    await publisher.publish(0, batch(stored(9)))
    await publisher.publish(9, batch(removed(4)))
    client, _ = await publisher.asked_again()
    await publisher.send_again(client, 8, batch(removed(1)))
    await publisher.send_again(client, -1)
    await eventually(lambda: (events.evicted_tokens, events.clears) == (5 * 16, 1))


async def test_a_replay_that_is_not_answered_is_a_clear(
    heard: tuple[KvEvents, Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "KV_REPLAY_S_MAX", 0.1)
    events, publisher = heard
    await publisher.publish(0, batch(stored(9)))
    await publisher.publish(2, batch(removed(4)))
    await eventually(lambda: (events.evicted_tokens, events.clears) == (4 * 16, 1))
