"""Every example runs on a platform, and prints what its page promises."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import ssl
import sys
from pathlib import Path

import pytest
from aiohttp import web
from playwright.async_api import Browser, expect

from tests.agent.engines.upstream import Handler, play
from tests.cli.bench_target import DONE, piece, timed
from tests.client.browser import PATIENCE_MS
from tests.client.js_package import need
from tests.examples.conftest import link_modules, run_example, static_server
from tests.gateway.processes import Running
from tests.gateway.wire import MODEL
from tests.house.tree import ROOT
from tests.support.tls import Authority
from tests.support.venvs import venv_with

EXAMPLES = ROOT / "examples"
NOT_RUN = {"load/k6.js": "k6", "load/locustfile.py": "locust"}
"""Examples whose program is not installed for the tests."""
ANSWER = re.compile(r"streamed: (\S.{40,}?)\ntokens: 20\b", re.DOTALL)

pytestmark = [pytest.mark.platform, pytest.mark.timeout(480)]  # a first install is slow


def whole_and_streamed(out: str) -> None:
    """The streamed answer is the whole one, which the simulator repeats for the same prompt."""
    streamed = ANSWER.search(out)
    assert streamed, out
    whole = re.search(r"whole: (.*?)\nstreamed: ", out, re.DOTALL)
    assert whole is None or len(whole[1]) > 40


def resumed(out: str) -> None:
    found = re.search(r"first reader: (.+)\nleft resp_\w+ at 1-(\d+)\nsecond reader: (.+)\ncompleted", out, re.DOTALL)
    assert found and int(found[2]) >= 10, out
    assert re.search(r"tokens: 40\ncancel: accepted at 1-\d+", out), out


def responded(out: str) -> None:
    lines = out.splitlines()
    assert len(lines[0]) > 40 and lines[-1] == "status: completed", out


CHECKS = {
    "python/openai_chat.py": whole_and_streamed,
    "python/openai_responses.py": responded,
    "python/resume.py": resumed,
    "node/openai.mjs": whole_and_streamed,
    "node/anthropic.mjs": whole_and_streamed,
    "node/ai-sdk.mjs": whole_and_streamed,
    "node/langchain.mjs": whole_and_streamed,
    "node/resume.mjs": resumed,
}


def test_every_example_is_on_the_page_and_runs_here() -> None:
    page = (EXAMPLES / "README.md").read_text()
    listed = set(re.findall(r"\]\(([\w/.-]+\.(?:sh|py|mjs|js|html))\)", page))
    there = {
        str(path.relative_to(EXAMPLES))
        for path in EXAMPLES.rglob("*")
        if path.suffix in (".sh", ".py", ".mjs", ".js", ".html") and "node_modules" not in path.parts
    }
    others = {name for name in there if name.startswith("ai-sdk/")}
    assert listed == there - others - {name for name in there if name.startswith("browser/client/")}
    own = set(CHECKS) | set(NOT_RUN) | set(re.findall(r'EXAMPLES / "([^"]+)"', Path(__file__).read_text()))
    assert listed <= own, "each has a test"


def test_the_packages_are_those_of_the_tests() -> None:
    wanted = json.loads((EXAMPLES / "node" / "package.json").read_text())["dependencies"]
    tested = json.loads((ROOT / "tests" / "node" / "package.json").read_text())
    versions = tested["dependencies"] | tested["devDependencies"]
    assert {name: version for name, version in wanted.items() if not version.startswith("file:")}.items() <= (
        versions.items()
    )


@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith("python/")])
def test_python(name: str, platform: Running) -> None:
    CHECKS[name](run_example(platform, sys.executable, str(EXAMPLES / name), env={"PYTHONPATH": str(ROOT)}))


def test_langchain_for_python(platform: Running) -> None:
    python = venv_with("langchain-openai==1.7.4")
    whole_and_streamed(run_example(platform, str(python), str(EXAMPLES / "python/langchain_chat.py")))


def test_anthropic_for_python(platform: Running) -> None:
    out = run_example(platform, sys.executable, str(EXAMPLES / "anthropic_messages.py"))
    assert "stopped: max_tokens" in out and "prompt tokens:" in out


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node") / "node"
    shutil.copytree(EXAMPLES / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    link_modules(folder)
    return folder


@pytest.mark.parametrize("name", [name for name in CHECKS if name.startswith("node/")])
def test_node(name: str, platform: Running, node_folder: Path) -> None:
    CHECKS[name](run_example(platform, need("node"), name.removeprefix("node/"), cwd=node_folder))


def test_curl(platform: Running) -> None:
    out = run_example(platform, str(EXAMPLES / "curl/chat.sh"))
    out = out.replace(": hb\n", "")
    answer, again, cancelled = re.split(r"^# .*\n", out, flags=re.MULTILINE)[1:]
    assert re.search(r"data: \[DONE\]\nid: 1-\d+\s*$", answer)
    assert again.strip() and answer.endswith(again), "the second reader gets the same bytes from its cursor on"
    assert json.loads(cancelled)["result"] in ("accepted", "already")


def test_load(platform: Running, tmp_path: Path) -> None:
    env = {"USERS": "4", "SECONDS": "2", "TOKENS": "20"}
    out = run_example(platform, sys.executable, str(EXAMPLES / "load/load.py"), env=env)
    counts = re.search(r"answers (\d+), failures 0\n", out)
    assert counts and int(counts[1]) >= 4, out
    assert re.search(r"first token: median [\d.]+ ms", out) and re.search(r"gap: median [\d.]+ ms", out)
    bin_folder = Path(sys.executable).parent
    shutil.copy(EXAMPLES / "load/bench.sh", tmp_path)
    env = {"USERS": "2", "DURATION": "2s", "PATH": f"{bin_folder}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    out = run_example(platform, "bash", str(EXAMPLES / "load/bench.sh"), env=env)
    assert "TTFT" in out or "first token" in out.lower(), out


async def load_on(serve: Handler, folder: Path, **env: str) -> str:
    """Output of load.py for a server behind TLS, below a path."""
    authority = Authority(folder)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(authority.server.cert, authority.server.key)
    app = web.Application()
    app.router.add_post("/llm/v1/chat/completions", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        base = {"BASE_URL": f"https://127.0.0.1:{runner.addresses[0][1]}/llm", "SSL_CERT_FILE": str(authority.ca)}
        command = (sys.executable, str(EXAMPLES / "load/load.py"))
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **base, **env}, stdout=asyncio.subprocess.PIPE
        )
        return (await process.communicate())[0].decode()
    finally:
        await runner.cleanup()


async def test_load_reads_a_gateway_behind_tls(tmp_path: Path) -> None:
    out = await load_on(play(piece("a"), DONE), tmp_path, USERS="1", SECONDS="0.2")
    assert re.search(r"answers [1-9]\d*, failures 0\n", out), out


async def test_the_figures_of_a_load_are_those_of_the_server(tmp_path: Path) -> None:
    """Two answers at once, one of them 0.5 s late, of eleven pieces in one second."""
    late = iter((0.0, 0.5))

    async def serve(request: web.Request) -> web.StreamResponse:
        return await timed(next(late), 0.1, 11)(request)

    out = await load_on(serve, tmp_path, USERS="2", SECONDS="0.2")
    first, rate = re.search(r"first token: .* percentile ([\d.]+) ms", out), re.search(r"second: (\d+)\n", out)
    assert "answers 2, failures 0\n" in out and first and rate, out
    assert float(first[1]) < 800, "the longest is 500 ms and what the connection takes"
    assert int(rate[1]) <= 15, "22 pieces in 1.5 s at least"


async def test_the_page(platform: Running, browser: Browser) -> None:
    """An answer, a reload in its middle, a stop."""
    assert (EXAMPLES / "browser/index.html").exists()
    gate = platform.gates[0]
    with static_server(EXAMPLES / "browser") as url:
        page = await browser.new_page()
        await page.goto(f"{url}/?gateway={gate.url}&token={platform.key}&model={MODEL}")
        await page.click("#ask")
        await expect(page.locator("#answer")).to_have_text(re.compile(r"\w+ \w+"), timeout=PATIENCE_MS)
        before = await page.locator("#answer").text_content()
        await page.reload()
        await expect(page.locator("#state")).to_have_text("completed", timeout=PATIENCE_MS)
        after = await page.locator("#answer").text_content()
        assert before and after and after.startswith(before) and len(after) > len(before)
        await page.fill("#prompt", "Write a very long story, in a thousand lines.")
        await page.click("#ask")
        await expect(page.locator("#answer")).to_have_text(re.compile(r"\w+ \w+"), timeout=PATIENCE_MS)
        await page.click("#stop")
        await expect(page.locator("#state")).to_have_text(re.compile("cancelled|completed"), timeout=PATIENCE_MS)
        await page.close()
