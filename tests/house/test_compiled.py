"""The modules that the wheel has compiled."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compiled() -> list[str]:
    """Paths in ``COMPILED`` of ``setup.py``."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "COMPILED":
            return list(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no COMPILED")


@pytest.mark.parametrize("path", compiled())
def test_a_compiled_module_has_no_coroutines(path: str) -> None:
    """The coroutines of mypyc are not those of asyncio in every detail; in a trial one crashed its process."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    assert not any(isinstance(node, ast.AsyncFunctionDef | ast.Await) for node in nodes)


@pytest.mark.parametrize("path", compiled())
def test_a_suite_runs_on_what_it_says(path: str) -> None:
    """On the wheel every one of these modules is compiled; in the tree none is, because there they are the oracle."""
    file = Path(str(importlib.import_module(path.removesuffix(".py").replace("/", ".")).__file__))
    assert ROOT in file.parents
    assert (file.suffix != ".py") == bool(os.environ.get("STREAM_GW_TEST_COMPILED"))
