"""An engine's sleep: the port's contract, on the simulator, on the HTTP engine before a server that sleeps as vLLM
does, on vLLM's keeper with the stand-in, and, in ``tests/vllm``, with the real one; then what becomes of it when it
goes wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from inference.engines.openai import OpenAIEngine
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from inference.engines.sleep import SleepPolicy
from inference.engines.vllm import VllmEngine
from inference.engines.vllm_flags import VllmOptions
from stream_fabric.errors import EngineFailed, EngineLost, Unsupported
from stream_fabric.ports import Engine, SleepLevel
from tests.agent.engines.recorder import Recorder, completion
from tests.agent.engines.test_vllm import QUICK
from tests.agent.engines.upstream import SleepDoors, play, server, sim_handlers
from tests.gateway.processes import alive
from tests.support.waiting import eventually
from tests.vllm import fake

SIM = "itl_ms=1,ttft_ms=0,max_num_seqs=8,sleep_ms=20,wake_ms=20,reload_ms=30"
EXACT = {"seed": 1, "temperature": 0, "ignore_eos": True}
LONG = "A long story about rivers. " * 60


class Setup:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def ask(self, number: int, text: str = "Tell me about rivers", tokens: int = 20) -> Recorder:
        sink = Recorder()
        self.engine.submit(completion(number, text, max_tokens=tokens, **EXACT), sink)
        return await sink.wait()


@pytest.fixture(params=["sim", "as vLLM", "vLLM's keeper"])
async def setup(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Setup]:
    if request.param == "vLLM's keeper":
        kept = VllmEngine(VllmOptions("m", ("--enable-sleep-mode",), fake.command(tmp_path)), QUICK)
        await kept.start()
        yield Setup(kept)
        await kept.close()
        assert not [pid for pid in fake.pids(tmp_path) if alive(pid)]
        return
    sim = SimEngine(SimSettings.parse(SIM))
    await sim.start()
    if request.param == "sim":
        yield Setup(sim)
    else:
        async with served(sim) as (engine, _):
            await engine.start()
            yield Setup(engine)
            await engine.close()
    await sim.close()


@asynccontextmanager
async def served(sim: SimEngine, **policy: float) -> AsyncIterator[tuple[OpenAIEngine, SleepDoors]]:
    doors = SleepDoors(sim)
    async with server({**sim_handlers(sim), **doors.posts}, doors.gets) as url:
        yield OpenAIEngine(url, sleep_policy=SleepPolicy(**policy)), doors


# --- the contract ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
async def test_it_sleeps_and_wakes_as_it_was(setup: Setup, level: SleepLevel) -> None:
    engine = setup.engine
    before, clears = await setup.ask(1), engine.load().kv_clears
    assert (engine.load().ready, engine.load().asleep) == (True, 0)
    await eventually(lambda: engine.sleep(level), "its own count to be of now")
    assert (engine.load().ready, engine.load().asleep) == (False, level)
    assert engine.load().kv_clears > clears, "what it held of prompts is gone"
    await engine.wake()
    assert (engine.load().ready, engine.load().asleep) == (True, 0)
    after = await setup.ask(2)
    assert (after.status, after.body()) == ("completed", before.body())
    assert after.body()


async def test_asleep_it_begins_nothing(setup: Setup) -> None:
    engine = setup.engine
    assert await engine.sleep(1)
    refused = await setup.ask(1)
    assert refused.error is not None
    assert (refused.status, refused.error.code, refused.error.retriable) == ("failed", "engine_lost", True)
    assert engine.load().running == engine.load().waiting == 0
    await engine.wake()
    assert (await setup.ask(2)).status == "completed"


async def test_what_runs_keeps_it_awake(setup: Setup) -> None:
    engine = setup.engine
    sink = Recorder()
    engine.submit(completion(1, max_tokens=200, **EXACT), sink)
    await eventually(lambda: sink.tokens() >= 2)
    assert not await engine.sleep(1)
    assert (engine.load().ready, engine.load().asleep) == (True, 0)
    assert (await sink.wait()).tokens() >= 190
    await eventually(lambda: engine.sleep(1), "a sleep after its end")
    await engine.wake()


async def test_again_is_the_same(setup: Setup) -> None:
    engine = setup.engine
    assert await engine.sleep(1)
    assert await engine.sleep(2), "it sleeps already, and stays at its level"
    assert engine.load().asleep == 1
    await engine.wake()
    await engine.wake()
    assert engine.load().ready
    assert (await setup.ask(1)).status == "completed"


async def test_a_prompt_that_it_held_is_computed_again(setup: Setup) -> None:
    if isinstance(setup.engine, VllmEngine) and setup.engine.load().kv_capacity_tokens == 0:
        pytest.skip("the stand-in for vLLM has no cache")
    await setup.ask(1, LONG)
    held = await setup.ask(2, LONG)
    assert held.prompt is not None and held.prompt[1] > 100
    await eventually(lambda: setup.engine.sleep(1))
    await setup.engine.wake()
    again = await setup.ask(3, LONG)
    assert again.prompt is not None and again.prompt[1] == 0


# --- who cannot --------------------------------------------------------------------------------------------------


async def test_a_simulator_that_is_told_so_cannot() -> None:
    sim = SimEngine(SimSettings.parse("itl_ms=1,ttft_ms=0,sleep_levels=1,sleep_ms=0,wake_ms=0"))
    await sim.start()
    with pytest.raises(Unsupported, match="sleep_levels"):
        await sim.sleep(2)
    assert await sim.sleep(1)
    await sim.close()


@pytest.mark.parametrize("tells", [False, True], ids=["any server", "a vLLM outside its development mode"])
async def test_a_server_that_knows_no_sleep_is_left_as_it_is(tells: bool) -> None:
    sim = SimEngine(SimSettings.parse(SIM))
    await sim.start()
    gets = {"/metrics": SleepDoors(sim).gets["/metrics"]} if tells else None
    async with server(sim_handlers(sim), gets) as url:
        engine = OpenAIEngine(url)
        await engine.start()
        with pytest.raises(Unsupported, match="cannot sleep"):
            await engine.sleep(1)
        assert (engine.load().ready, engine.load().asleep, engine.load().kv_clears) == (True, 0, 0)
        assert (await Setup(engine).ask(1)).status == "completed"
        await engine.close()
    await sim.close()


# --- a server by URL ---------------------------------------------------------------------------------------------


async def test_its_weights_are_read_again_before_it_computes() -> None:
    sim = SimEngine(SimSettings.parse(SIM))
    await sim.start()
    async with served(sim) as (engine, doors):
        await engine.start()
        assert await engine.sleep(2)
        assert doors.heard == ["/sleep?level=2&mode=wait"], "what others ask it meanwhile ends first"
        await engine.wake()
        assert doors.heard[1:] == ["/wake_up?tags=weights", "reload_weights", "/wake_up?tags=kv_cache"]
        doors.heard.clear()
        assert await engine.sleep(1)
        await engine.wake()
        assert doors.heard[1:] == ["/wake_up"]
        await engine.close()
    await sim.close()


@pytest.mark.parametrize("level", [1, 2])
async def test_who_finds_it_asleep_knows_the_level(level: SleepLevel) -> None:
    """Its agent died, and it did not."""
    sim = SimEngine(SimSettings.parse(SIM))
    await sim.start()
    await sim.sleep(level)
    async with served(sim) as (engine, doors):
        await engine.start()
        assert (engine.load().ready, engine.load().asleep) == (False, level)
        await engine.wake()
        assert ("reload_weights" in doors.heard) == (level == 2)
        assert (await Setup(engine).ask(1)).status == "completed"
        await engine.close()
    await sim.close()


async def test_one_that_fails_to_fall_asleep_is_not_believed_to_be_whole() -> None:
    sim = SimEngine(SimSettings.parse(SIM))
    await sim.start()
    async with served(sim) as (engine, doors):
        await engine.start()
        doors.fails = "/sleep"
        with pytest.raises(EngineFailed, match="/sleep answered 500: out of memory"):
            await engine.sleep(2)
        assert not engine.load().ready
        await engine.wake()
        assert "reload_weights" in doors.heard, "its weights may have been thrown away"
        assert engine.load().ready
        assert (await Setup(engine).ask(1)).status == "completed"
        await engine.close()
    await sim.close()


@pytest.mark.parametrize("fails", ["/wake_up?tags=weights", "reload_weights", "/wake_up?tags=kv_cache"])
async def test_one_that_does_not_wake_takes_nothing(fails: str) -> None:
    sim = SimEngine(SimSettings.parse(SIM))
    await sim.start()
    async with served(sim) as (engine, doors):
        await engine.start()
        await engine.sleep(2)
        doors.fails = fails
        with pytest.raises(EngineFailed, match=r"did not wake: .*out of memory"):
            await engine.wake()
        assert not engine.load().ready
        assert (await Setup(engine).ask(1)).status == "failed"
        await engine.close()
    await sim.close()


async def test_one_that_takes_too_long_to_wake_has_failed() -> None:
    sim = SimEngine(SimSettings.parse("sleep_ms=0,wake_ms=60000"))
    await sim.start()
    async with served(sim, wake_s=0.2) as (engine, _):
        await engine.start()
        assert await engine.sleep(1)
        with pytest.raises(EngineFailed, match=r"did not wake within 0\.2 s"):
            await engine.wake()
        assert not engine.load().ready
        await engine.close()
    await sim.close()


async def test_one_that_takes_too_long_to_fall_asleep_may_still_do_it() -> None:
    """It waits for what others ask it: woken before that it would sleep behind our back."""
    sim = SimEngine(SimSettings.parse("sleep_ms=60000"))
    await sim.start()
    async with served(sim, sleep_s=0.2) as (engine, _):
        await engine.start()
        with pytest.raises(EngineFailed, match=r"did not fall asleep within 0\.2 s"):
            await engine.sleep(1)
        with pytest.raises(EngineFailed, match=r"did not fall asleep within 0\.2 s"):
            await engine.wake()
        assert not engine.load().ready
        await engine.close()
    await sim.close()


async def test_one_that_wakes_and_makes_no_token_has_failed() -> None:
    sim = SimEngine(SimSettings.parse(SIM))
    await sim.start()
    doors = SleepDoors(sim)
    mute = {"/v1/completions": play(b'{"error": {"message": "no tokens today"}}', status=500)}
    async with server({**mute, **doors.posts}, doors.gets) as url:
        engine = OpenAIEngine(url)
        await engine.start()
        await engine.sleep(1)
        with pytest.raises(
            EngineFailed, match="did not wake: vLLM does not serve the model it loaded: no tokens today"
        ):
            await engine.wake()
        assert not sim.load().asleep and not engine.load().ready
        await engine.close()
    await sim.close()


# --- vLLM, kept --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def kept(folder: Path, *flags: str, **policy: float) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(VllmOptions("m", tuple(flags), python=fake.command(folder), sleep=SleepPolicy(**policy)), QUICK)
    await engine.start()
    yield engine
    await engine.close()
    assert not [pid for pid in fake.pids(folder) if alive(pid)]


async def test_a_vllm_that_can_sleep_gets_the_addresses_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    async with kept(tmp_path, "--enable-sleep-mode") as engine:
        assert fake.calls(tmp_path)[0]["env"]["VLLM_SERVER_DEV_MODE"] == "1"
        assert await engine.sleep(1)
        assert "frees no memory" not in caplog.text
    (tmp_path / "calls").unlink()
    async with kept(tmp_path) as engine:
        assert "VLLM_SERVER_DEV_MODE" not in fake.calls(tmp_path)[0]["env"]
        with pytest.raises(Unsupported, match="--enable-sleep-mode"):
            await engine.sleep(1)
        assert engine.load().ready


async def test_a_development_mode_alone_is_told_to_free_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    async with kept(tmp_path) as engine:
        assert await engine.sleep(1)
        assert "vLLM sleeps without freeing memory" in caplog.text


async def test_asleep_it_is_not_taken_for_dead_and_one_that_dies_comes_back_awake(tmp_path: Path) -> None:
    async with kept(tmp_path, "--enable-sleep-mode") as engine:
        assert await engine.sleep(2)
        first = engine.pid
        looked = fake.health(tmp_path)
        await eventually(lambda: fake.health(tmp_path) > looked + 1, "two looks at its health")
        assert (engine.pid, engine.load().asleep) == (first, 2)
        fake.kill(tmp_path)
        await eventually(lambda: engine.load().ready, "a new vLLM")
        assert engine.load().asleep == 0 and engine.pid != first
        await engine.wake()
        assert engine.load().ready


async def test_one_that_does_not_wake_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with kept(tmp_path, "--enable-sleep-mode") as engine:
        assert await engine.sleep(1)
        first = engine.pid
        fake.set_mode(tmp_path, "drowsy")
        with pytest.raises(
            EngineLost, match=r"did not wake: /wake_up answered 500: no memory; vLLM is being restarted"
        ):
            await engine.wake()
        assert (engine.load().ready, engine.load().asleep) == (False, 0)
        with pytest.raises(EngineLost, match="being restarted"):
            await engine.wake()
        assert not await engine.sleep(1)
        fake.set_mode(tmp_path, "ok")
        await eventually(lambda: engine.load().ready, "a new vLLM")
        assert engine.pid != first
        sink = Recorder()
        engine.submit(completion(1, max_tokens=3), sink)
        assert (await sink.wait()).status == "completed"


async def test_one_that_dies_while_it_wakes_comes_back_once(tmp_path: Path) -> None:
    async with kept(tmp_path, "--enable-sleep-mode") as engine:
        assert await engine.sleep(1)
        fake.set_mode(tmp_path, "fatal")
        with pytest.raises(EngineLost):
            await engine.wake()
        fake.set_mode(tmp_path, "ok")
        await eventually(lambda: engine.load().ready, "a new vLLM")
        pid = engine.pid
        looked = fake.health(tmp_path)
        await eventually(lambda: fake.health(tmp_path) > looked + 1, "two looks at its health")
        assert engine.pid == pid, "what failed was the life before"


async def test_close_while_it_wakes_leaves_nothing(tmp_path: Path) -> None:
    async with kept(tmp_path, "--enable-sleep-mode") as engine:
        assert await engine.sleep(1)
        fake.set_mode(tmp_path, "comatose")
        waking = asyncio.create_task(engine.wake())
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineLost):
            await waking
