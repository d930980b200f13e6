"""A server program that a test starts, disturbs and ends. Blocking helpers; no fixed ports or paths."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Self

import hiredis

from stream_fabric.process.death_signal import die_with_parent
from tests.support.missing import missing

_STOP_S = 30.0


def find_binary(*names: str) -> str:
    """Path of the first installed program. Skips the test when there is none; fails it where ``CI`` is set."""
    found = next((path for path in map(shutil.which, names) if path is not None), None)
    if found is None:
        missing(f"needs one of {', '.join(names)} on PATH")
    return found


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 15.0, every_s: float = 0.01) -> Any:
    """Poll until the condition returns something true. Raises TimeoutError that shows the last result."""
    deadline = time.monotonic() + timeout_s
    last: object = None
    while True:
        try:
            last = condition()
            if last:
                return last
        except (OSError, hiredis.HiredisError) as error:
            last = error
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}; last saw {last!r}")
        time.sleep(every_s)


def free_port() -> int:
    """A free TCP port below the kernel's range for outgoing connections, which no client takes meanwhile."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


_starter = ThreadPoolExecutor(1, thread_name_prefix="server-starter")
"""Thread that starts every server: a server is killed when the thread that started it ends."""


def spawn(args: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
    """Start a program that ends with this process, also when this process is killed."""
    options["preexec_fn"] = die_with_parent()
    return _starter.submit(subprocess.Popen, args, **options).result()


class Started(ABC):
    """Servers that run within a ``with`` block. What a failed start has begun is ended too."""

    @abstractmethod
    def start(self) -> Self: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self.close()


class ServerProcess(Started):
    """One process with a folder of its own, which outlives the process until ``close``. Subclasses define ``start``."""

    def __init__(self, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"stream-gw-{name}-"))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start the process, or start it again with the same data; return when it answers."""
        raise NotImplementedError

    def launch(self, args: Sequence[str | Path], **options: Any) -> subprocess.Popen[bytes]:
        """Start the program with its output appended to ``log``."""
        with self._log_file.open("ab") as log:
            self.process = spawn(args, stdout=log, stderr=log, **options)
        return self.process

    @property
    def _log_file(self) -> Path:
        return self.folder / "log"

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace") if self._log_file.exists() else ""

    def open_log(self) -> IO[bytes]:
        return self._log_file.open("rb")

    def freeze(self) -> None:
        """SIGSTOP: the process answers nothing, its connections stay."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, and wait; SIGKILL when that takes too long."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self.process = None

    def kill(self) -> None:
        """SIGKILL: the process announces nothing."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
