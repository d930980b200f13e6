"""vLLM as a child: its OpenAI server started, warmed up, watched, started again, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from inference.agent.engines.artifact import artifact_of
from inference.agent.engines.child import Child
from inference.agent.engines.openai import OpenAIEngine
from inference.agent.engines.sleep import SleepPolicy
from inference.agent.engines.warm_up import warm_up
from stream_fabric.errors import EngineFailed, EngineLost
from stream_fabric.frames import ErrorInfo
from stream_fabric.ids import StreamId
from stream_fabric.limits import (
    VLLM_BACKOFF_S_MAX,
    VLLM_BACKOFF_S_MIN,
    VLLM_SILENT_S_MAX,
    VLLM_START_S_MAX,
    VLLM_STARTS_MAX,
    VLLM_STEADY_S,
    VLLM_TERM_S_MAX,
)
from stream_fabric.ports import EngineLoad, EngineRequest, FrameSink, Loaded, SleepLevel

if TYPE_CHECKING:
    from inference.agent.engines.kv_events import KvEvents

log = logging.getLogger(__name__)

_BOOT_PROBE_EVERY_S = 0.2
_HEALTH_EVERY_S = 1.0
_PROBE_S = 5.0
_DYING_S = 2.0
_SLEEP_FLAG = "--enable-sleep-mode"
_TIMES_FLAG = "--enable-per-request-metrics"
"""vLLM tells with each answer how long it waited and computed. Versions before 0.32 may not know it."""
_OURS = {
    "host": "the agent's own; vLLM listens on loopback",
    "port": "the agent's own; vLLM listens on a free port",
    "uds": "the agent's own; vLLM listens on loopback",
    "model": "--model of stream-gw",
    "api-key": "--upstream-api-key of stream-gw",
    "ssl-keyfile": "not for loopback",
    "ssl-certfile": "not for loopback",
    "root-path": "not for loopback",
    "headless": "not for a server",
}
"""vLLM's flags that are not for the user, with what stands in their place."""


class VllmOptions(msgspec.Struct, frozen=True):
    model: str
    flags: tuple[str, ...] = ()
    """vLLM's own, as on its command line; they win over what we would pass."""
    python: str = ""
    """The interpreter whose environment holds vLLM; empty: the ``vllm`` command beside our own, or on the PATH."""
    slots: int = 256
    """``max_num_seqs``, unless the flags say it: no address of vLLM's tells it, so it is always passed."""
    api_key: str = ""
    kv_events: bool = False
    start_s: float = VLLM_START_S_MAX
    sleep: SleepPolicy = SleepPolicy()


class RestartPolicy(msgspec.Struct, frozen=True):
    backoff_s_min: float = VLLM_BACKOFF_S_MIN
    backoff_s_max: float = VLLM_BACKOFF_S_MAX
    steady_s: float = VLLM_STEADY_S
    starts_max: int = VLLM_STARTS_MAX
    silent_s: float = VLLM_SILENT_S_MAX
    term_s: float = VLLM_TERM_S_MAX

    def delay_s(self, attempt: int, luck: float) -> float:
        """How long to wait before the start number ``attempt``, from 0, since it was steady. ``luck``: 0 to 1."""
        longest = min(self.backoff_s_max, self.backoff_s_min * 2.0 ** min(attempt, 30))
        return longest * (0.5 + luck / 2)


def flags_of(options: VllmOptions) -> tuple[list[str], int]:
    """What vLLM is started with but its address, and its ``max_num_seqs``. Raises ValueError on what cannot be had."""
    given = dict(_named(options.flags))
    for name, instead in _OURS.items():
        if name in given:
            raise ValueError(f"--{name} cannot be given to vLLM: {instead}")
    if options.flags and not options.flags[0].startswith("-"):
        raise ValueError(f"{options.flags[0]!r} after -- is no flag; name the model with --model")
    if options.kv_events and "kv-events-config" in given:
        raise ValueError("--kv-events-config cannot be given to vLLM beside --kv-events of stream-gw: leave one out")
    if options.kv_events and given.get("data-parallel-size", given.get("dp", "1")) != "1":
        raise ValueError("--kv-events of stream-gw counts one engine's cache, not --data-parallel-size of them")
    slots = options.slots
    if "max-num-seqs" in given:
        text = given["max-num-seqs"] or ""
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"--max-num-seqs for vLLM must be a number from 1, got {text!r}")
        slots = int(text)
    flags = []
    for flag in ("--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"):
        if f"no-{flag[2:]}" in given:
            log.warning("vLLM gets --no-%s, as asked, where stream-gw passes %s", flag[2:], flag)
        elif flag[2:] not in given:
            flags.append(flag)
    if not {_TIMES_FLAG[2:], f"no-{_TIMES_FLAG[2:]}", "disable-log-stats"} & given.keys():
        flags.append(_TIMES_FLAG)
    if "max-num-seqs" not in given:
        flags += ["--max-num-seqs", str(slots)]
    return [*flags, *options.flags], slots


def _named(flags: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each flag's name, as vLLM reads it, and what follows it."""
    for at, flag in enumerate(flags):
        if flag.startswith("-"):
            name, equals, value = flag.lstrip("-").partition("=")
            after = flags[at + 1] if at + 1 < len(flags) and not flags[at + 1].startswith("-") else None
            yield name.replace("_", "-"), value if equals else after


def command_of(python: str) -> list[str]:
    """How vLLM is called. Raises ValueError when it is not there."""
    if python:
        if shutil.which(python) is None:
            raise ValueError(f"--vllm-python (STREAM_GW_VLLM_PYTHON): {python!r} cannot be run")
        return [python, "-m", "vllm.entrypoints.cli.main"]
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("vllm")
    if found is None:
        raise ValueError(
            "no vllm command beside this Python or on the PATH; install vLLM, or name the Python whose environment "
            "holds it with --vllm-python (STREAM_GW_VLLM_PYTHON)"
        )
    return [found]


class VllmEngine:
    """Boots vLLM and speaks to it through an ``OpenAIEngine``, a new one for each of vLLM's lives."""

    def __init__(self, options: VllmOptions, policy: RestartPolicy | None = None) -> None:
        self._options = options
        self._policy = policy or RestartPolicy()
        self._flags, self._slots = flags_of(options)
        self._command = command_of(options.python)
        self._kv = _kv_events() if options.kv_events else None
        self._http: OpenAIEngine | None = None
        self._child: Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._before = EngineLoad(0, 0, self._slots)
        """The counters of the lives that are over."""
        self._loaded = Loaded()
        self._unfit = ""
        """Why this life is to end."""

    async def start(self) -> Sequence[str]:
        models = await self._boot()
        assert self._http is not None
        artifact = await asyncio.to_thread(artifact_of, self._options.model, self._options.flags)
        self._loaded = msgspec.structs.replace(self._http.loaded(), artifact=artifact)
        self._supervisor = asyncio.create_task(self._supervise(), name="vllm")
        return models

    async def serving(self) -> None:
        assert self._supervisor is not None, "start comes first"
        await asyncio.wait([self._supervisor])
        if not self._supervisor.cancelled():
            self._supervisor.result()

    def submit(self, request: EngineRequest, sink: FrameSink) -> None:
        if self._http is None or self._unfit:
            sink.end("failed", ErrorInfo.of(EngineLost("vLLM is being started again; try again soon")))
        else:
            self._http.submit(request, sink)

    def abort(self, stream: StreamId) -> None:
        if self._http is not None:
            self._http.abort(stream)

    def load(self) -> EngineLoad:
        now = self._http.load() if self._http is not None else EngineLoad(0, 0, self._slots, ready=False)
        if self._unfit:
            now = msgspec.structs.replace(now, ready=False, asleep=0)
        before, kv = self._before, self._kv
        return msgspec.structs.replace(
            now,
            kv_evicted_tokens=kv.evicted_tokens if kv is not None else 0,
            kv_clears=before.kv_clears + now.kv_clears + (kv.clears if kv is not None else 0),
            prefix_queries_tokens=before.prefix_queries_tokens + now.prefix_queries_tokens,
            prefix_hits_tokens=before.prefix_hits_tokens + now.prefix_hits_tokens,
        )

    def loaded(self) -> Loaded:
        return self._loaded

    async def sleep(self, level: SleepLevel) -> bool:
        if self._http is None or self._unfit:
            return False
        slept = await self._http.sleep(level)
        if slept and not _sleeps(self._flags):
            log.warning("vLLM was started without %s: asleep it holds requests back, and frees no memory", _SLEEP_FLAG)
        return slept

    async def wake(self) -> None:
        http = self._http
        if http is None or self._unfit:
            raise EngineLost("vLLM is being started again")
        try:
            await http.wake()
        except EngineFailed as failed:
            if self._http is http:
                self._unfit = failed.message
            raise EngineLost(f"{failed.message}; vLLM is started again") from failed

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        await self._end()

    @property
    def pid(self) -> int | None:
        """vLLM's process, while there is one."""
        return self._child.pid if self._child is not None else None

    @property
    def url(self) -> str | None:
        """Where vLLM answers, while there is one."""
        return self._child.url if self._child is not None else None

    # --- a life ----------------------------------------------------------------------------------------------

    async def _boot(self) -> Sequence[str]:
        """From nothing to a first token. Raises EngineFailed; then nothing is left of it."""
        began = time.monotonic()
        try:
            with _free_port() as port:
                models, http = await self._come_up(port)
        except BaseException as error:
            await self._end()
            if _TIMES_FLAG in self._flags and _TIMES_FLAG not in self._options.flags and _is_unknown(error):
                log.warning("this vLLM does not know %s: its queue time is estimated", _TIMES_FLAG)
                self._flags.remove(_TIMES_FLAG)
                return await self._boot()
            raise
        self._http = http
        log.info("vLLM serves %s as process %s after %.1f s", ", ".join(models), self.pid, time.monotonic() - began)
        return models

    async def _come_up(self, port: int) -> tuple[Sequence[str], OpenAIEngine]:
        flags = ["serve", self._options.model, "--host", "127.0.0.1", "--port", str(port), *self._flags]
        if self._kv is not None:
            flags += ["--kv-events-config", self._kv.listen()]
        url = f"http://127.0.0.1:{port}"
        child = self._child = await Child.start(
            [*self._command, *flags], _environment(self._options.api_key, self._flags), url, self._policy.term_s
        )
        http = OpenAIEngine(url, self._options.api_key, self._slots, self._options.sleep)
        ready = asyncio.create_task(_until_ready(http, url), name="vllm-boot")
        try:
            await asyncio.wait([ready, child.ended], timeout=self._options.start_s, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and ready.exception() is None:
                return ready.result(), http
            if ready.done():  # it may have died of what it was asked
                await asyncio.wait([child.ended], timeout=_DYING_S)
            if child.ended.done():
                raise EngineFailed(f"vLLM ended with {child.ended.result()} at its start; {await child.last_words()}")
            if ready.done():
                ready.result()
            raise EngineFailed(f"vLLM was not ready within {self._options.start_s:g} s; {await child.last_words()}")
        except BaseException:
            ready.cancel()
            await asyncio.wait([ready])
            await http.close()
            raise

    async def _supervise(self) -> None:
        policy, loop = self._policy, asyncio.get_running_loop()
        attempt = 0
        while True:
            ready_at = loop.time()
            lost = EngineLost(await self._until_lost())
            child = self._child
            await self._end(lost)
            if child is not None:
                log.error("%s; it is started again; %s", lost.message, await child.last_words())
            if loop.time() - ready_at >= policy.steady_s:
                attempt = 0
            failures = 0
            while True:
                await asyncio.sleep(policy.delay_s(attempt, random.random()))
                attempt += 1
                try:
                    await self._boot()
                    break
                except EngineFailed as error:
                    failures += 1
                    log.error("start %d of %d failed: %s", failures, policy.starts_max, error.message)
                    if failures >= policy.starts_max:
                        raise EngineFailed(
                            f"vLLM did not come up in {failures} starts in a row: {error.message}"
                        ) from error

    async def _until_lost(self) -> str:
        """Wait until vLLM is of no use any more; why."""
        child, loop = self._child, asyncio.get_running_loop()
        assert child is not None
        heard_at = loop.time()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_S)) as session:
            while not (await asyncio.wait([child.ended], timeout=_HEALTH_EVERY_S))[0]:
                if self._unfit:
                    return self._unfit
                health = await _health(session, child.url)
                if health == 503:  # its server outlives its engine by seconds, and serves nothing
                    return "vLLM's engine died"
                if health is not None:
                    heard_at = loop.time()
                elif loop.time() - heard_at > self._policy.silent_s:
                    return f"vLLM answered nothing for {self._policy.silent_s:g} s"
        return f"vLLM ended with {child.ended.result()}"

    async def _end(self, lost: EngineLost | None = None) -> None:
        """Nothing of this life is left afterwards. ``lost``: what its requests are told."""
        http, self._http = self._http, None
        self._unfit = ""
        if http is not None:
            last = http.load()
            before = self._before
            self._before = EngineLoad(
                0,
                0,
                self._slots,
                kv_clears=before.kv_clears + last.kv_clears + 1,  # its cache goes with it
                prefix_queries_tokens=before.prefix_queries_tokens + last.prefix_queries_tokens,
                prefix_hits_tokens=before.prefix_hits_tokens + last.prefix_hits_tokens,
            )
            if lost is not None:
                http.lose(lost)
            await http.close()
        if self._child is not None:
            await self._child.stop()
            self._child = None
        if self._kv is not None:
            self._kv.close()


def _is_unknown(error: BaseException) -> bool:
    """Whether vLLM ended because it does not know our flag."""
    return isinstance(error, EngineFailed) and bool(
        re.search(rf"unrecognized arguments:[^\n]*{_TIMES_FLAG}", error.message)
    )


async def _until_ready(http: OpenAIEngine, url: str) -> Sequence[str]:
    """Wait for the server, then for a first token; the models it serves."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_S)) as session:
        while await _health(session, url) != 200:  # noqa: ASYNC110
            await asyncio.sleep(_BOOT_PROBE_EVERY_S)
    models = await http.start()
    await warm_up(http.submit, http.abort, models[0])
    return models


async def _health(session: aiohttp.ClientSession, url: str) -> int | None:
    """The status it answers with; None: it does not answer."""
    try:
        async with session.get(f"{url}/health") as response:
            return response.status
    except (aiohttp.ClientError, TimeoutError):
        return None


def _kv_events() -> KvEvents:
    try:
        from inference.agent.engines.kv_events import KvEvents
    except ImportError as error:
        raise ValueError(
            "--kv-events (STREAM_GW_KV_EVENTS) needs pyzmq: pip install 'stream-gw[vllm]', or leave it off"
        ) from error
    return KvEvents()


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """A port that the kernel gives nobody else meanwhile. vLLM may bind it beside us: both say SO_REUSEADDR, and only
    vLLM listens."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _sleeps(flags: Sequence[str]) -> bool:
    """Whether vLLM is started so that it can give its memory back."""
    return _SLEEP_FLAG[2:] in dict(_named(flags))


def _environment(api_key: str, flags: Sequence[str]) -> dict[str, str]:
    """Ours, but for our own settings: Redis's password is not for vLLM."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("STREAM_GW_")}
    if _sleeps(flags):
        env["VLLM_SERVER_DEV_MODE"] = "1"  # or it has no address for it
    if api_key:
        env["VLLM_API_KEY"] = api_key
    return env
