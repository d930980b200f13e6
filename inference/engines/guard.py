"""Guard process between the agent and vLLM: ``guard.py TERM_S COMMAND…`` ends the command when stdin closes.

vLLM's engine and worker processes outlive a server that is killed, and hold the GPU. A signal on the parent's death
(PR_SET_PDEATHSIG) reaches the server alone, and a server that hangs ends nobody. A pipe closes however the agent
dies, and the guard is the parent of every orphan of vLLM, so it knows when nothing is left. It writes vLLM's process
id to stdout, and later its exit code.

It runs as a file in a bare interpreter (``-I -S``), which takes 9 MB instead of 60: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time


def main(term_s: float, command: list[str]) -> None:
    """Run the command; end it with all its processes when stdin closes, on a signal, or when it exits."""
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans of vLLM's become our children
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    vllm = subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        process_group=0,
        preexec_fn=lambda: prctl(1, int(signal.SIGKILL), 0, 0, 0),  # PR_SET_PDEATHSIG: when the guard is killed
    )
    write_number(vllm.pid)
    deadline: float | None = None
    while (code := exit_code(vllm.pid)) is None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        ready = select.select([woken] if deadline else [0, woken], [], [], left)[0]
        signals = os.read(woken, 64) if woken in ready else b""
        if deadline is None and (0 in ready or any(number != signal.SIGCHLD for number in signals)):
            os.kill(vllm.pid, signal.SIGTERM)
            deadline = time.monotonic() + term_s
    write_number(-signal.SIGKILL if code is None else code)
    os.killpg(vllm.pid, signal.SIGKILL)
    try:
        while True:
            os.wait()
            with open(f"/proc/self/task/{os.getpid()}/children") as children:  # also those that left the process group
                for child in children.read().split():
                    os.kill(int(child), signal.SIGKILL)
    except ChildProcessError:
        pass  # nothing is left


def write_number(number: int) -> None:
    """Write a line with the process id or the exit code to the agent."""
    with contextlib.suppress(OSError):  # the agent may be gone
        os.write(1, b"%d\n" % number)


def exit_code(pid: int) -> int | None:
    """Return the exit code, negative for a signal; None: the process runs. The process stays unreaped."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # WNOWAIT: nobody else gets its pid
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
