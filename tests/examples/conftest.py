"""Two gateways and two simulated replicas on which examples and other clients run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.client.js_package import MANIFEST, NODE_MODULES, PACKAGE, need
from tests.gateway.processes import Running, running
from tests.gateway.wire import MODEL
from tests.house.tree import ROOT

RUN_S = 120


@pytest.fixture(scope="session")
def platform() -> Iterator[Running]:
    with running(sim="itl_ms=5,ttft_ms=10", STREAM_GW_CORS_ORIGINS="*") as started:
        yield started


def run_example(platform: Running, *command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Output of a program that finds the platform by the variables of examples/README.md, and succeeds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "ANTHROPIC_"))}
    urls = [gate.url for gate in platform.gates]
    own = {"BASE_URL": urls[0], "BASE_URLS": ",".join(urls), "API_KEY": platform.key, "MODEL": MODEL}
    done = subprocess.run(
        command, cwd=cwd, env={**kept, **own, **(env or {})}, capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def link_modules(folder: Path) -> None:
    """Let Node find the packages of tests/node, and ours, from ``folder``."""
    need("node")
    modules = folder / "node_modules"
    modules.mkdir()
    for package in NODE_MODULES.iterdir():
        if not package.name.startswith("."):
            (modules / package.name).symlink_to(package)
    (modules / MANIFEST["name"]).symlink_to(PACKAGE)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def static_server(folder: Path) -> Iterator[str]:
    """``python -m http.server`` in a thread; yields its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
