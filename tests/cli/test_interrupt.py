"""Ctrl-C at a terminal ends a command that waits, with the shell's code for it and nothing that alarms."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import socket
import subprocess
import termios
from collections.abc import Iterator

import pytest

from tests.gateway.processes import CLI, clean_env

pytestmark = pytest.mark.platform

INTERRUPTED = 130


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server


def _lead_terminal() -> None:
    """Make standard input the terminal of this process, whose Ctrl-C reaches it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["replicas"], INTERRUPTED),
        (["replicas", "drain", "r", "--wait-s", "600"], INTERRUPTED),
        (["pools"], INTERRUPTED),
        (["doctor"], INTERRUPTED),
        (["telemetry", "dlq", "list"], INTERRUPTED),
        (["traces", "list"], INTERRUPTED),
        (["usage", "reconcile"], INTERRUPTED),
        (["traces", "tail"], 0),  # it has no other end
    ],
    ids=str,
)
def test_an_interrupted_command_says_nothing_and_leaves_the_terminal_as_it_was(
    silent: socket.socket, flags: list[str], expected: int
) -> None:
    host = f"127.0.0.1:{silent.getsockname()[1]}"
    env = clean_env(
        STREAM_GW_REDIS_URL=f"redis://{host}/0",
        STREAM_GW_TELEMETRY_URL=f"http://{host}",
        STREAM_GW_TELEMETRY_TOKEN="a-token",
    )
    terminal, inner = pty.openpty()
    try:
        before = termios.tcgetattr(inner)
        with subprocess.Popen(
            [*CLI, *flags], env=env, stdin=inner, stdout=inner, stderr=inner,
            start_new_session=True, preexec_fn=_lead_terminal,
        ) as command:  # fmt: skip
            connection, _ = silent.accept()  # it waits for an answer from here on
            with connection:
                os.write(terminal, b"\x03")
                code = command.wait(15)
        os.set_blocking(terminal, False)
        shown = os.read(terminal, 1 << 16)
        assert code == expected and b"Traceback" not in shown and b"stream-gw " not in shown, shown
        assert termios.tcgetattr(inner) == before
    finally:
        os.close(terminal)
        os.close(inner)
