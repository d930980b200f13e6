"""The real vLLM for tests: how it is started, asked without us, and looked at."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from inference.engines.child import GUARD
from inference.engines.prometheus import VllmMetrics, read_metrics
from inference.engines.vllm import VllmEngine
from inference.engines.vllm_flags import VllmOptions
from stream_fabric.pool.records import EngineRequest
from stream_fabric.ports import Engine
from tests.agent.engines.recorder import Recorder, stream_id
from tests.gateway.processes import CLI, Process, clean_env
from tests.gateway.wire import Gate

FIGURES: list[str] = []
"""Measured figures, printed at the end."""

SLOTS = 64
KV_TOKENS = 16_384
BLOCK = 32
MODEL = "tiny"
CONTEXT = 8192
SMALL = ("--enforce-eager", "--max-model-len", str(CONTEXT), "--block-size", str(BLOCK))
GENERATION = (
    *SMALL,
    "--served-model-name", MODEL, "sim-small",  # the second for the engines' contract suite
    "--kv-cache-memory-bytes", str(KV_TOKENS * 512),
    "--max-num-seqs", str(SLOTS),
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--reasoning-parser", "deepseek_v3",
    "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
)  # fmt: skip

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Lima", "Oslo", "Quito"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "thing",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
                "ok": {"type": "boolean"},
                "name": {"type": "string", "pattern": "^[a-z]{3,9}$"},
            },
            "required": ["n", "ok", "name"],
            "additionalProperties": False,
        },
    },
}


def lora_slots(adapters: int) -> tuple[str, ...]:
    """vLLM's flags for so many adapters and one slot that stays empty.

    On a CPU vLLM 0.32 computes what asks for no adapter with the weights in its last slot, where another request of the
    same batch asks for one (``lora_ops.py`` indexes the slots by -1)."""
    return "--enable-lora", "--max-loras", str(adapters + 1)


@dataclass(frozen=True)
class Home:
    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def model(self, name: str = "tiny") -> str:
        return str(self.folder / "models" / name)

    def engine(self, flags: Sequence[str] = GENERATION, model: str = "tiny", **options: Any) -> VllmEngine:
        return VllmEngine(VllmOptions(self.model(model), tuple(flags), self.python, **options))


def chat(text: str = "Tell me about rivers", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def endless(text: str = "Tell me about rivers", tokens: int = 7000) -> dict[str, Any]:
    return chat(text, ignore_eos=True, max_tokens=tokens)


def request(
    number: int,
    body: dict[str, Any],
    kind: Literal["chat", "completions", "embeddings", "rerank", "classify", "score"] = "chat",
) -> EngineRequest:
    return EngineRequest(stream_id(number), kind, MODEL, msgspec.Raw(msgspec.json.encode(body)))


async def ask(engine: Engine, asked: EngineRequest, within_s: float = 60) -> Recorder:
    sink = Recorder(choices=asked.choices)
    engine.submit(asked, sink)
    async with asyncio.timeout(within_s):
        await sink.ended.wait()
    return sink


class Direct:
    """vLLM without us between."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def post(self, path: str, body: Any = None) -> tuple[int, bytes]:
        async with aiohttp.ClientSession() as session, session.post(self.url + path, json=body) as response:
            return response.status, await response.read()

    async def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """A streamed answer's."""
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        status, answer = await self.post(path, streamed)
        assert status == 200, answer
        lines = [line.removeprefix("data: ") for line in answer.decode().split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    async def serves(self) -> bool:
        """Whether it answers yet."""
        try:
            async with aiohttp.ClientSession() as session, session.get(self.url + "/health") as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def metrics(self) -> VllmMetrics:
        async with aiohttp.ClientSession() as session, session.get(self.url + "/metrics") as response:
            return read_metrics(await response.read())

    async def until_idle(self, within_s: float = 10.0, *, running: int = 0) -> float:
        """Poll its own count until ``running`` requests run and none waits; how long that took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with aiohttp.ClientSession() as session, asyncio.timeout(within_s):
            while True:
                async with session.get(self.url + "/metrics") as response:
                    metrics = read_metrics(await response.read())
                assert metrics.shown
                if metrics.running == running and not metrics.waiting:
                    return loop.time() - began
                await asyncio.sleep(0.005)


@dataclass
class Answer:
    """One choice of a streamed answer, whatever its chunks were."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments."""
    tokens: tuple[tuple[str, float], ...] = ()
    """With their log probabilities, where asked."""
    offsets: tuple[int, ...] = ()
    """Text offsets of the tokens of a completion."""
    finish: str | None = None


def folded(chunks: Sequence[dict[str, Any]]) -> tuple[dict[int, Answer], dict[str, Any]]:
    """The choices and the usage of chunks from either side."""
    answers: dict[int, Answer] = {}
    calls: dict[tuple[int, int], list[str]] = {}
    usage: dict[str, Any] = {}
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            index = choice["index"]
            answer = answers.setdefault(index, Answer())
            delta = choice.get("delta", choice)
            answer.text += delta.get("content") or delta.get("text") or ""
            answer.reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault((index, part["index"]), ["", ""])
                call[0] += part["function"].get("name") or ""
                call[1] += part["function"].get("arguments") or ""
            told = choice.get("logprobs") or {}
            answer.tokens += tuple((item["token"], item["logprob"]) for item in told.get("content") or ())
            answer.tokens += tuple(zip(told.get("tokens") or (), told.get("token_logprobs") or (), strict=True))
            answer.offsets += tuple(told.get("text_offset") or ())
            answer.finish = choice.get("finish_reason") or answer.finish
    for (index, _), (name, arguments) in sorted(calls.items()):
        answers[index].calls += ((name, arguments),)
    return answers, usage


def tokens_of(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Prompt, cached, output."""
    details = usage.get("prompt_tokens_details") or {}
    return usage["prompt_tokens"], details.get("cached_tokens") or 0, usage["completion_tokens"]


@dataclass(frozen=True)
class Up:
    """A ``stream-gw up`` on vLLM, with one gateway."""

    gate: Gate
    process: Process

    @property
    def agents(self) -> list[int]:
        return [agent["pid"] for agent in self.process.facts["agents"]]

    @property
    def children(self) -> list[int]:
        return children(self.process.pid)


@contextlib.contextmanager
def up(model: str, python: str, *flags: str, replicas: int = 1) -> Iterator[Up]:
    """``flags``: vLLM's."""
    engine = ["--engine", "vllm", "--model", model, "--vllm-python", python]
    command = ["up", "--port", "0", "--gateways", "1", "--no-telemetry", "--no-database", *engine, "--", *flags]
    if replicas != 1:
        command[1:1] = ["--replicas", str(replicas)]
    with Process(*command) as process:
        (gateway,) = process.facts["gateways"]
        yield Up(Gate(gateway["url"], gateway["pid"], process.facts["key"]), process)


@contextlib.contextmanager
def starting_up(model: str, python: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """One that has not said that it is ready. Whatever the test does, it is ended."""
    command = [*CLI, "up", "--port", "0", "--no-telemetry", "--no-database", "--engine", "vllm", "--model", model]
    command += ["--vllm-python", python, "--", *flags]
    # A leftover process would hold a pipe open, so only stderr is one
    with subprocess.Popen(
        command, env=clean_env(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


# --- processes -------------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """Every process below ``pid``, itself not."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(parent, []).append(int(folder.name))
    found = list(parents.get(pid, ()))
    for child in found:  # grows meanwhile
        found += parents.get(child, ())
    return found


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def cpu_s(pid: int) -> float:
    """CPU time of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def after(flag: str, words: Sequence[str]) -> str:
    return words[list(words).index(flag) + 1]


def server_below(pid: int) -> tuple[int, Direct]:
    """The vLLM server that an agent runs."""
    for child in children(pid):
        words = command_line(child)
        if "serve" in words and "--port" in words and "stream_gw.cli" not in words and str(GUARD) not in words:
            return child, Direct(f"http://127.0.0.1:{after('--port', words)}")
    raise AssertionError(f"no vLLM below {pid}: {[command_line(child) for child in children(pid)]}")
