"""Common parts of the benchmarks: native programs, pinned processes, memory, medians, the machine's description."""

from __future__ import annotations

import json
import os
import platform as machine
import shutil
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).parent
BIN = HERE / "bin"
_START_S = STOP_S = 10.0


def build() -> None:
    """Compile what is older than its source."""
    BIN.mkdir(exist_ok=True)
    header = HERE / "native" / "net.h"
    for source in (HERE / "native").glob("*.c"):
        target = BIN / source.stem
        newest = max(source.stat().st_mtime, header.stat().st_mtime)
        if not target.exists() or target.stat().st_mtime < newest:
            command = ["gcc", "-O2", "-Wall", "-Wextra", "-Wno-format-truncation", "-o", str(target), str(source)]
            subprocess.run(command, check=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_port(port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"nothing listens on port {port} after {_START_S:g} s")


# --- cores ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cores:
    """One core for the process under test alone; everything else shares the rest."""

    gateway: frozenset[int]
    rest: frozenset[int]

    @classmethod
    def pick(cls) -> Cores:
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < 2:
            raise SystemExit("two cores are needed: one for the gateway alone, one for everything else")
        return cls(frozenset(usable[:1]), frozenset(usable[1:]))


def pin(pid: int, cores: Iterable[int]) -> None:
    """Every thread that the process has."""
    for task in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(task), cores)


def start(command: Sequence[str], cores: Iterable[int], **options: Any) -> subprocess.Popen[str]:
    """Its children inherit the cores."""
    return subprocess.Popen(command, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cores), **options)


def stop(process: subprocess.Popen[str], sign: signal.Signals = signal.SIGTERM) -> None:
    if process.poll() is None:
        process.send_signal(sign)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- what is measured ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A server under test. ``watch``: the processes whose CPU is counted; the first is the one that delivers."""

    name: str
    port: int
    watch: Mapping[str, int]
    kind: str = "sse"
    key: str = ""
    model: str = "bench"
    redis_url: str = ""


class Source(Protocol):
    """Where tokens come from: something that makes streams flow through a target at the pace that a reader asks for.

    The engine is one: nginx proxies it and the agent reads it.
    """

    control: str
    """Path of the socket by which the reader paces and ends streams (native/net.h)."""

    def stop(self) -> None: ...


class EngineSource:
    """The fake engine: an OpenAI-compatible server on ``port``, and one for the agent that listens at ``steps``."""

    def __init__(self, cores: Cores, folder: Path) -> None:
        self.port = free_port()
        self.control = str(folder / "control.sock")
        self.steps = str(folder / "steps.sock")
        command = [str(BIN / "engine"), "--port", str(self.port), "--control", self.control, "--steps", self.steps]
        self._process = start(command, cores.rest, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("the fake engine did not start")
        self.pid = self._process.pid

    def stop(self) -> None:
        stop(self._process)


class Nginx:
    def __init__(self, cores: Cores, folder: Path, upstream: int) -> None:
        self.port = free_port()
        home = folder / "nginx"
        home.mkdir(exist_ok=True)
        template = string.Template((HERE / "nginx.conf").read_text())
        conf = home / "nginx.conf"
        conf.write_text(template.substitute(folder=home, port=self.port, upstream=upstream))
        command = [nginx_path(), "-p", str(home), "-c", str(conf)]
        self._process = start(command, cores.gateway, stderr=subprocess.DEVNULL)
        wait_port(self.port)
        self.pid = self._worker()

    def _worker(self) -> int:
        """The one worker; the master, which listens before it has it, does nothing."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        deadline = time.monotonic() + STOP_S
        while not (found := children.read_text().split()):
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("nginx has no worker")
            time.sleep(0.02)
        return int(found[0])

    def target(self) -> Target:
        return Target("nginx", self.port, {"gateway": self.pid})

    def stop(self) -> None:
        stop(self._process)


def _find_nginx() -> str | None:
    return shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")


def nginx_path() -> str:
    path = _find_nginx()
    if path is None:
        raise SystemExit("nginx is the yardstick and is not installed (apt-get install nginx-light)")
    return path


class LoadFailed(Exception):
    """A stream was wrong, or none came."""


def load_command(target: Target, source: Source | None, flags: Mapping[str, object]) -> list[str]:
    command = [str(BIN / "load"), "--target", f"127.0.0.1:{target.port}"]
    command += ["--kind", target.kind, "--model", target.model]
    if target.key:
        command += ["--key", target.key]
    if target.watch:
        command += ["--watch", ",".join(f"{name}={pid}" for name, pid in target.watch.items())]
    if source is not None:
        command += ["--control", source.control]
    for name, value in flags.items():
        command += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return command


def load(target: Target, source: Source | None, cores: Cores, **flags: object) -> dict[str, Any]:
    """Run the load client to its end. Raises LoadFailed when a stream was not whole."""
    command = load_command(target, source, flags)
    process = start(command, cores.rest, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, errors = process.communicate()
    if process.returncode != 0:
        raise LoadFailed(f"{target.name} ({target.kind}): {errors.strip()[:2000]}")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


class Held:
    """Streams (or sockets) that stay open, silent, within the ``with`` block; each is checked to its end afterwards."""

    def __init__(self, target: Target, source: Source, cores: Cores, count: int, **flags: object) -> None:
        flags = {"streams": count, "mode": "idle", "open_every_us": 500, "hold": True, **flags}
        self._name = f"{target.name} ({target.kind})"
        self._command = load_command(target, source, flags)
        self._cores = cores

    def __enter__(self) -> Held:
        pipe = subprocess.PIPE
        self._process = start(self._command, self._cores.rest, stdin=pipe, stdout=pipe, stderr=pipe)
        assert self._process.stdout is not None
        if "open" not in self._process.stdout.readline():
            raise LoadFailed(f"{self._name}: {self._process.communicate()[1].strip()[:2000]}")
        return self

    def __exit__(self, *error: object) -> None:
        _, errors = self._process.communicate("end\n")
        if self._process.returncode != 0:
            raise LoadFailed(f"{self._name}: {errors.strip()[:2000]}")


@dataclass(frozen=True)
class Memory:
    rss_kib: int
    private_kib: int


def cpu_s(*pids: int) -> float:
    """CPU seconds of processes so far, with all their threads."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def below(pid: int) -> list[int]:
    """Return the processes that this process has started, and theirs."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [found for child in children for found in (child, *below(child))]


def memory(pid: int) -> Memory:
    kib = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        kib[name.rstrip(":")] = int(value)
    return Memory(kib["Rss"], kib["Private_Clean"] + kib["Private_Dirty"])


# --- figures -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """The median of the repetitions, with their range."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return self.spell(2 if self.median < 10 else 1)

    def spell(self, digits: int) -> str:
        low, high = min(self.values), max(self.values)
        if len(self.values) == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "absent"
    return (done.stdout or done.stderr).strip().splitlines()[0]


def describe() -> dict[str, object]:
    """The machine and the versions: a figure without them says nothing."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    packages = {}
    for package in ("stream-gw", "uvicorn", "uvloop", "websockets", "hiredis"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "absent"
    nginx = _find_nginx()  # not every benchmark needs it
    return {
        "cpu": names[0].partition(":")[2].strip() if names else machine.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": round(os.getloadavg()[0], 2),
        "kernel": machine.release(),
        "python": f"{machine.python_version()} ({os.path.realpath(sys.executable)})",  # a build's flags count
        "nginx": _first_line(nginx, "-v").removeprefix("nginx version: ") if nginx else "absent",
        "redis": _first_line("redis-server", "-v"),
        **packages,
    }


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="stream-gw-bench-")
