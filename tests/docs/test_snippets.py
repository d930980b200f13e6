"""The pages' snippets run: Python and curl on a platform, and every command with the parser of its flags."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from stream_gw.auth import read_keys_file
from stream_gw.cli.main import load_command, make_parsers
from tests.docs.snippets import Snippet, commands, snippets
from tests.gateway.processes import Running, running
from tests.house.tree import ROOT
from tests.support.missing import missing

MAKEFILE = (ROOT / "Makefile").read_text()
ELSEWHERE = {"docker", "kubectl", "helm", "clickhouse-client", "export", "vllm", "curl", "pip", "psql", "npm", "cd"}
"""Programs whose commands are not checked here."""


def _is_command(words: list[str]) -> bool:
    """False for a line of a block that is a picture, a configuration of another program or output."""
    return words[0] in ("stream-gw", "make", "python") or words[0] in ELSEWHERE


SHELL = [
    pytest.param(words, id=f"{snippet.page}:{line} {' '.join(words)[:60]}")
    for snippet in snippets("sh")
    for line, words in commands(snippet)
    if _is_command(words)
]


@pytest.mark.parametrize("words", SHELL)
def test_a_command_exists_and_takes_its_flags(words: list[str]) -> None:
    match words[0]:
        case "stream-gw":
            check_flags(words[1:])
        case "make":
            for target in words[1:]:
                if "=" not in target:
                    assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), f"make has no target {target}"
            arguments = [word for word in words if word.startswith("ARGS=")]
            if words[1] == "up" and arguments:
                check_flags(["up", *arguments[0].removeprefix("ARGS=").split()])
        case "python" if words[1] == "-m":
            assert importlib.util.find_spec(words[2]) is not None, f"there is no module {words[2]}"


def check_flags(flags: list[str]) -> None:
    """Fail for flags that the command line refuses."""
    flags = flags[: flags.index("--")] if "--" in flags else flags
    flags = [flag for flag in flags if flag not in (">", "<")]
    parser, parsers = make_parsers()
    parser.check_flags([flag for flag in flags[:1] if flag.startswith("-")])
    if flags[0] in parsers:
        load_command(flags[0]).add_flags(parsers[flags[0]])
        parsers[flags[0]].check_flags(flags[1:])
    try:
        parser.parse_args(flags)
    except SystemExit as ended:
        assert ended.code == 0, f"stream-gw refuses {flags}"


@pytest.mark.parametrize("snippet", snippets("toml"), ids=str)
def test_toml_is_read(snippet: Snippet, tmp_path: Path) -> None:
    value = tomllib.loads(snippet.text)
    if "tenant" in value and "key" in value["tenant"][0]:
        path = tmp_path / "tenants.toml"
        path.write_text(snippet.text)
        read_keys_file(path)


@pytest.mark.parametrize("snippet", snippets("yaml"), ids=str)
def test_yaml_is_read(snippet: Snippet) -> None:
    assert list(yaml.safe_load_all(snippet.text))


@pytest.fixture(scope="module")
def platform() -> Iterator[Running]:
    with running(sim="itl_ms=5,ttft_ms=10,length_max=80") as started:
        yield started


def here(text: str, platform: Running) -> str:
    """The snippet with this platform's addresses."""
    for port, gate in zip((8080, 8081), platform.gates, strict=True):
        text = re.sub(rf"(127\.0\.0\.1|localhost):{port}\b", f"127.0.0.1:{gate.port}", text)
    assert not re.search(r"(127\.0\.0\.1|localhost):80\d\d", text), "an address that this platform does not have"
    return text


@pytest.mark.platform
@pytest.mark.parametrize("snippet", snippets("python"), ids=str)
def test_python_runs_and_prints_an_answer(snippet: Snippet, platform: Running, tmp_path: Path) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(here(snippet.text, platform))
    done = subprocess.run([sys.executable, str(file)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 10, done.stdout


@pytest.mark.platform
def test_the_stream_of_the_readme_resumes_on_the_other_gateway(platform: Running) -> None:
    """The commands of the block in their order; the id that the first prints is put into the others."""
    (block,) = [snippet for snippet in snippets("sh") if str(snippet.page) == "README.md" and "after=" in snippet.text]
    create, resume, cancel = here(block.text.replace("\\\n", " "), platform).strip().split("\n")
    first = _bash(create)
    found = re.search(r"(?i)^x-stream-id: (resp_\w+)", first, re.MULTILINE)
    assert found, first
    assert "data: [DONE]" in first
    rest = _bash(resume.replace("resp_…", found[1]))
    assert rest.replace(": hb\n", "") == first.replace(": hb\n", "").partition("id: 1-20\n\n")[2]
    assert '"result"' in _bash(cancel.replace("resp_…", found[1]))


def _bash(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.platform
@pytest.mark.parametrize("snippet", snippets("jsx"), ids=str)
def test_a_page_is_bundled_with_the_official_packages(snippet: Snippet) -> None:
    packages = ROOT / "tests" / "node" / "node_modules"
    esbuild = packages / ".bin" / "esbuild"
    if not esbuild.exists():
        missing("needs the packages of tests/node; run: make node")
    done = subprocess.run(
        [esbuild, "--bundle", "--loader=jsx", "--jsx=automatic", "--format=esm", "--outfile=/dev/null"],
        input=snippet.text,
        env={**os.environ, "NODE_PATH": str(packages)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
