"""The programs of the npm package's page run, with the package as npm packs it; gateways serve the same modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.client.js_package import PACKAGE, install, need
from tests.examples.conftest import run_example
from tests.gateway.processes import Running

pytestmark = pytest.mark.platform

PROGRAMS = re.findall(r"^```js\n(.*?)^```$", (PACKAGE / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    install(folder)
    return folder


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_of_the_page_runs(number: int, platform: Running, installed: Path) -> None:
    program = PROGRAMS[number]
    for port, gate in zip((8080, 8081), platform.gates, strict=True):
        program = program.replace(f"127.0.0.1:{port}", f"127.0.0.1:{gate.port}")
    if 'from "ws"' not in program:  # as if Node 22 had run it
        program = f'import Own from "ws";\nglobalThis.WebSocket ??= Own;\n{program}'
    (installed / f"program{number}.mjs").write_text(program)
    out = run_example(platform, need("node"), f"program{number}.mjs", cwd=installed)
    if ".input(" in program:
        assert out.split() == ["accepted", "my-input-1", "applied"]
    else:
        assert "accepted 1-" in out if "cancel()" in program else len(out.split()) > 10, out


async def test_a_gateway_serves_the_modules_of_the_package(platform: Running) -> None:
    for module in sorted((PACKAGE / "src").glob("*.js")):
        reply = await platform.gates[0].ask("GET", f"/static/client/{module.name}", headers={"authorization": ""})
        assert (reply.status, reply.body) == (200, module.read_bytes())
        assert "javascript" in reply.headers["content-type"]
    assert (await platform.gates[0].ask("GET", "/static/client/..%2f..%2fREADME.md")).status == 404
