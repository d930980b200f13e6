"""The npm package of the browser client: its contents, its types, and that the gateway serves the same files."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.client.js_package import MANIFEST, PACKAGE, install, need, run
from tests.house.tree import ROOT

SOURCE = PACKAGE / "src"
STATIC = ROOT / "stream_gw" / "static"
MODULE_LINES = 400


def test_its_version_and_license_are_those_of_the_platform() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (MANIFEST["version"], MANIFEST["license"]) == (project["version"], project["license"])
    assert (PACKAGE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_it_needs_neither_dependencies_nor_a_build() -> None:
    assert not MANIFEST.keys() & {"dependencies", "peerDependencies", "scripts"}
    for module in SOURCE.glob("*.js"):
        imports = re.findall(r'(?:from|import\() ?"([^"]+)"', module.read_text())
        assert all((SOURCE / name).is_file() for name in imports), module.name


def test_a_module_is_no_longer_than_a_reader_holds() -> None:
    assert max(len(module.read_text().splitlines()) for module in SOURCE.iterdir()) <= MODULE_LINES


def test_the_gateway_serves_the_files_of_the_package() -> None:
    """A link and no copy: nothing can differ."""
    assert (STATIC / "client").resolve() == SOURCE
    assert 'export * from "./client/index.js";' in (STATIC / "client.js").read_text()
    assert 'export * from "./client/index.js";' in (STATIC / "client.d.ts").read_text()


@pytest.mark.platform
def test_what_is_published_is_the_source_the_license_and_the_page(tmp_path: Path) -> None:
    (packed,) = json.loads(run(need("npm"), "pack", "--dry-run", "--json", cwd=PACKAGE))
    shipped = {file["path"] for file in packed["files"]}
    assert shipped == {"LICENSE", "README.md", "package.json"} | {f"src/{path.name}" for path in SOURCE.iterdir()}
    assert packed["size"] < 40_000
    entry = MANIFEST["exports"]["."]
    assert {entry["types"], entry["default"]} <= {f"./{name}" for name in shipped}


@pytest.mark.platform
def test_the_types_name_what_the_modules_export() -> None:
    script = f'import("{(SOURCE / "index.js").as_uri()}").then((all) => console.log(JSON.stringify(Object.keys(all))))'
    exported = set(json.loads(run(need("node"), "-e", script, cwd=PACKAGE)))
    declared = re.findall(r"^export (?:const|function|class) (\w+)", (SOURCE / "index.d.ts").read_text(), re.MULTILINE)
    assert set(declared) == exported


@pytest.mark.platform
@pytest.mark.parametrize("resolution", ["nodenext", "bundler"])
def test_typescript_accepts_a_program_of_a_user(resolution: str, tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    shutil.copyfile(Path(__file__).parent / "client_types.ts", tmp_path / "client_types.ts")
    flags = ["--noEmit", "--strict", "--target", "es2022", "--lib", "es2022,dom", "--types", ""]
    module = {"nodenext": "nodenext", "bundler": "preserve"}[resolution]
    run(need("tsc"), *flags, "--module", module, "--moduleResolution", resolution, "client_types.ts", cwd=tmp_path)
