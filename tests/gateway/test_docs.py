"""Pages that are made from the code, held to it."""

from __future__ import annotations

import re
from pathlib import Path

from stream_gw.cli.configuration import names, table
from stream_gw.cli.package.client_page import page
from stream_gw.cli.variables import SETTINGS, unknown_variables
from tests.house.tree import files, text

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_the_settings() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == table(), (
        "run: python -m stream_gw.cli.configuration > docs/configuration.md"
    )


def test_the_known_variables_are_the_settings() -> None:
    assert names() == SETTINGS, f"correct SETTINGS in stream_gw/cli/variables.py: {sorted(names() ^ SETTINGS)}"


def test_variables_that_code_builds_and_tests_read_are_known() -> None:
    read = re.compile(r"(?:environ(?:\.get)?[\[(]\"|\$[({]|\b[A-Z_]+ = \"|@)(STREAM_GW_[A-Z0-9_]+)")
    texts = [text(path) for path in (Path("Makefile"), *files(".py"))]
    found = {name for each in texts for name in read.findall(each)}
    assert {"STREAM_GW_TRACES", "STREAM_GW_QUICK", "STREAM_GW_STEPS", "STREAM_GW_TEST_FABRIC"} <= found
    assert not unknown_variables(dict.fromkeys(found, ""))


def test_the_page_of_the_python_client_is_its_docstrings() -> None:
    assert (ROOT / "docs" / "python-client.md").read_text() == page(), (
        "run: python -m stream_gw.cli.package.client_page > docs/python-client.md"
    )


def test_the_architecture_page_names_files_that_are_there() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    named = {word.strip("`,.()").partition(":")[0] for word in text.split() if "/" in word and ".py" in word}
    paths = {name for name in named if name.endswith(".py") and "{" not in name}
    assert len(paths) > 10
    assert not {path for path in paths if not (ROOT / path).exists()}
