"""Servers that tests start."""

from __future__ import annotations

import subprocess
import sys

from tests.gateway.processes import alive
from tests.support.server import wait_for

_RUN = """
import threading
from tests.support.server import ServerProcess

server = ServerProcess("house")
thread = threading.Thread(target=server.launch, args=[["sleep", "600"]])
thread.start()
thread.join()
print(server.process.pid, flush=True)
input()
print(server.process.poll(), flush=True)
input()
"""


def test_a_server_outlives_the_thread_that_starts_it_and_ends_with_a_killed_process() -> None:
    command = [sys.executable, "-c", _RUN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None and run.stdout is not None
        server = int(run.stdout.readline())
        run.stdin.write("\n")
        run.stdin.flush()
        assert run.stdout.readline() == "None\n"
        run.kill()
    wait_for(lambda: not alive(server), "the server to end with the process that started it")
