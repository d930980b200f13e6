"""Engine ``vllm``: runs vLLM's OpenAI server as a child process, watches it, and starts it again when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from inference.engines.artifact import artifact_of
from inference.engines.child import Child
from inference.engines.openai import OpenAIEngine
from inference.engines.vllm_flags import (
    PLUGIN,
    SCHEDULER,
    SLEEP_FLAG,
    TIMES_FLAG,
    PlugIns,
    VllmOptions,
    can_sleep,
    command_of,
    compiles,
    environment,
    flags_of,
    plugin_flags,
)
from inference.engines.vllm_probe import until_lost, until_ready
from stream_fabric.errors import EngineFailed, EngineLost
from stream_fabric.limits import (
    VLLM_BACKOFF_S_MAX,
    VLLM_BACKOFF_S_MIN,
    VLLM_SILENT_S_MAX,
    VLLM_STARTS_MAX,
    VLLM_STEADY_S,
    VLLM_TERM_S_MAX,
)
from stream_fabric.pool.records import EngineLoad, EngineRequest, Loaded
from stream_fabric.ports import FrameSink, SleepLevel
from stream_fabric.process.backoff import Backoff, BackoffPolicy
from stream_fabric.process.host import HostRandom
from stream_fabric.stream.frames import ErrorInfo
from stream_fabric.stream.ids import StreamId

if TYPE_CHECKING:
    from inference.engines.kv_events import KvEvents

log = logging.getLogger(__name__)

_DYING_S = 2.0
"""Time for a process to end after its warm-up has failed."""


class RestartPolicy(msgspec.Struct, frozen=True):
    """When a vLLM that ended is started again."""

    backoff: BackoffPolicy = BackoffPolicy(VLLM_BACKOFF_S_MIN, VLLM_BACKOFF_S_MAX)
    steady_s: float = VLLM_STEADY_S
    """A process that served for this time resets the backoff."""
    starts_max: int = VLLM_STARTS_MAX
    """Failed starts in a row after which the engine gives up."""
    silent_s: float = VLLM_SILENT_S_MAX
    term_s: float = VLLM_TERM_S_MAX


class VllmEngine:
    """Runs vLLM as a child process and talks to it through an ``OpenAIEngine``; both are new after each restart."""

    def __init__(self, options: VllmOptions, policy: RestartPolicy | None = None) -> None:
        self._options = options
        self._policy = policy or RestartPolicy()
        self._flags, self._slots = flags_of(options)
        self._command = command_of(options.python)
        self._kv = _make_kv_events() if options.kv_events else None
        self._steps = options.steps
        """Path of the step socket; ``auto``: in a folder of its own; ``off``: none."""
        self._itl_objective_s = options.itl_objective_s
        """0: vLLM's own scheduler."""
        self._limits_steps = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._http: OpenAIEngine | None = None
        self._child: Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._before = EngineLoad(0, 0, self._slots)
        """Counters of the processes that have ended."""
        self._loaded = Loaded()
        """The last process's."""
        self._unfit = ""
        """The reason why this process has to end; empty: it may go on."""

    async def start(self) -> Sequence[str]:
        if self._steps == "auto" or self._itl_objective_s:
            self._folder = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="stream-gw-")
            if self._steps == "auto":
                self._steps = f"{self._folder.name}/steps"
        models = await self._boot()
        artifact = await asyncio.to_thread(artifact_of, self._options.model, self._options.flags)
        self._loaded = Loaded(artifact=artifact)
        self._supervisor = asyncio.create_task(self._supervise(), name="vllm")
        return models

    async def serving(self) -> None:
        assert self._supervisor is not None, "start comes first"
        await asyncio.wait([self._supervisor])
        if not self._supervisor.cancelled():
            self._supervisor.result()

    def submit(self, request: EngineRequest, sink: FrameSink) -> None:
        if self._http is None or self._unfit:
            sink.end("failed", ErrorInfo.of(EngineLost("vLLM is being restarted; try again soon")))
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
            itl_objective_ms=self._itl_objective_s * 1000 if self._limits_steps else 0.0,
        )

    def loaded(self) -> Loaded:
        if self._http is not None:
            self._loaded = msgspec.structs.replace(self._http.loaded(), artifact=self._loaded.artifact)
        return self._loaded

    async def sleep(self, level: SleepLevel) -> bool:
        if self._http is None or self._unfit:
            return False
        slept = await self._http.sleep(level)
        if slept and not can_sleep(self._flags):
            log.warning("vLLM sleeps without freeing memory, start it with the flag: flag=%s", SLEEP_FLAG)
        return slept

    async def wake(self) -> None:
        http = self._http
        if http is None or self._unfit:
            raise EngineLost("vLLM is being restarted")
        try:
            await http.wake()
        except EngineFailed as failed:
            if self._http is http:
                self._unfit = failed.message
            raise EngineLost(f"{failed.message}; vLLM is being restarted") from failed

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        await self._stop_server()
        if self._folder is not None:
            await asyncio.to_thread(self._folder.cleanup)

    @property
    def pid(self) -> int | None:
        """Process id of vLLM; None: it does not run."""
        return self._child.pid if self._child is not None else None

    @property
    def url(self) -> str | None:
        """Base URL of vLLM; None: it does not run."""
        return self._child.url if self._child is not None else None

    # --- one process ---------------------------------------------------------------------------------------

    async def _boot(self) -> Sequence[str]:
        """Start vLLM and wait for its first token. Raises EngineFailed, and then leaves no process behind."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            with _free_port() as port:
                models, http = await self._start_server(port)
        except BaseException as error:
            await self._stop_server()
            if TIMES_FLAG in self._flags and TIMES_FLAG not in self._options.flags and _lacks_times_flag(error):
                log.warning("this version of vLLM lacks a flag, its queue times are estimated: flag=%s", TIMES_FLAG)
                self._flags.remove(TIMES_FLAG)
                return await self._boot()
            if self._steps != "off" and _lacks_plugin(error):
                log.warning("vLLM cannot load stream-gw's plug-in, tokens come by HTTP: error=%s", error)
                self._steps = "off"
                return await self._boot()
            if self._itl_objective_s and _lacks_scheduler(error):
                log.warning("vLLM cannot load stream-gw's scheduler, its steps are not limited: error=%s", error)
                self._itl_objective_s = 0.0
                return await self._boot()
            raise
        self._http = http
        in_force = self._plugins().in_force
        self._limits_steps = bool(in_force) and await asyncio.to_thread(Path(in_force).exists)
        log.info("vLLM serves: models=%s pid=%s took_s=%.1f", ",".join(models), self.pid, loop.time() - began)
        return models

    async def _start_server(self, port: int) -> tuple[Sequence[str], OpenAIEngine]:
        """Start vLLM's process on this port, and return its models and a client once it is ready."""
        flags = ["serve", self._options.model, "--host", "127.0.0.1", "--port", str(port), *self._flags]
        if self._kv is not None:
            flags += ["--kv-events-config", self._kv.listen()]
        plugins = self._plugins()
        env = environment(self._options.api_key, self._flags, plugins)
        url = f"http://127.0.0.1:{port}"
        http = OpenAIEngine(url, self._options.api_key, self._slots, self._options.sleep, plugins.steps)
        try:
            await http.listen()  # a plug-in whose first try fails makes its second one half a second later
            log.info("vLLM starts: model=%s", self._options.model)
            self._child = await Child.start(
                [*self._command, *flags, *plugin_flags(plugins)], env, url, self._policy.term_s
            )
            return await self._wait_ready(http, self._child), http
        except BaseException:
            await http.close()
            raise

    async def _wait_ready(self, http: OpenAIEngine, child: Child) -> Sequence[str]:
        """Wait for the warm-up, and return vLLM's models. Raises EngineFailed with vLLM's last lines."""
        ready = asyncio.create_task(until_ready(http, child.url, with_logprobs=compiles(self._flags)), name="vllm-boot")
        try:
            await asyncio.wait([ready, child.ended], timeout=self._options.start_s, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and ready.exception() is None:
                return ready.result()
            if ready.done():  # the warm-up may have killed it
                await asyncio.wait([child.ended], timeout=_DYING_S)
            if child.ended.done():
                raise EngineFailed(
                    f"vLLM ended with exit code {child.ended.result()} at its start; {await child.last_lines()}"
                )
            if ready.done():
                ready.result()
            raise EngineFailed(f"vLLM was not ready within {self._options.start_s:g} s; {await child.last_lines()}")
        except BaseException:
            ready.cancel()
            await asyncio.wait([ready])
            raise

    def _plugins(self) -> PlugIns:
        in_force = ""
        if self._itl_objective_s:
            assert self._folder is not None, "start made it"
            in_force = f"{self._folder.name}/budget"
        return PlugIns("" if self._steps == "off" else self._steps, self._itl_objective_s, in_force)

    async def _supervise(self) -> None:
        """Restart vLLM each time it is lost. Raises EngineFailed after too many failed starts in a row."""
        policy, loop = self._policy, asyncio.get_running_loop()
        backoff = Backoff(policy.backoff, HostRandom())
        while True:
            ready_at = loop.time()
            child = self._child
            assert child is not None, "a process was started"
            lost = EngineLost(await until_lost(child, lambda: self._unfit, policy.silent_s))
            await self._stop_server(lost)
            log.error("vLLM lost, restarting: reason=%s; %s", lost.message, await child.last_lines())
            if loop.time() - ready_at >= policy.steady_s:
                backoff.reset()
            failures = 0
            while True:
                await asyncio.sleep(backoff.next_s())
                try:
                    await self._boot()
                    break
                except EngineFailed as error:
                    failures += 1
                    log.error(
                        "start of vLLM failed: attempt=%d of=%d error=%s", failures, policy.starts_max, error.message
                    )
                    if failures >= policy.starts_max:
                        raise EngineFailed(f"vLLM failed {failures} starts in a row: {error.message}") from error

    async def _stop_server(self, lost: EngineLost | None = None) -> None:
        """Stop vLLM and release its resources. ``lost``: the error for its running requests."""
        http, self._http = self._http, None
        self._unfit = ""
        if http is not None:
            last = http.load()
            before = self._before
            self._before = EngineLoad(
                0,
                0,
                self._slots,
                kv_clears=before.kv_clears + last.kv_clears + 1,  # the cache is lost with the process
                prefix_queries_tokens=before.prefix_queries_tokens + last.prefix_queries_tokens,
                prefix_hits_tokens=before.prefix_hits_tokens + last.prefix_hits_tokens,
            )
            if lost is not None:
                http.fail_all(lost)
            await http.close()
        if self._child is not None:
            await self._child.stop()
            self._child = None
        if self._kv is not None:
            self._kv.close()


def _lacks_scheduler(error: BaseException) -> bool:
    """Whether vLLM ended because it cannot load the scheduler with a step budget, or knows no other scheduler."""
    return isinstance(error, EngineFailed) and (
        SCHEDULER in error.message or bool(re.search(r"unrecognized arguments:[^\n]*--scheduler-cls", error.message))
    )


def _lacks_times_flag(error: BaseException) -> bool:
    """Whether vLLM ended because it does not know the flag for request times."""
    return isinstance(error, EngineFailed) and bool(
        re.search(rf"unrecognized arguments:[^\n]*{TIMES_FLAG}", error.message)
    )


def _lacks_plugin(error: BaseException) -> bool:
    """Whether vLLM ended because it cannot import the plug-in, or knows no middleware."""
    return isinstance(error, EngineFailed) and (
        PLUGIN in error.message or bool(re.search(r"unrecognized arguments:[^\n]*--middleware", error.message))
    )


def _make_kv_events() -> KvEvents:
    """Make the counter of evictions. Raises ValueError without pyzmq."""
    try:
        from inference.engines.kv_events import KvEvents
    except ImportError as error:
        raise ValueError(
            "--kv-events (STREAM_GW_KV_EVENTS) needs pyzmq: pip install 'stream-gw[vllm]', or leave it off"
        ) from error
    return KvEvents()


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """Hold a port that the kernel gives to no other process, and yield its number.

    vLLM can bind it at the same time: both set SO_REUSEADDR, and only vLLM listens.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
