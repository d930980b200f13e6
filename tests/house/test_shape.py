"""Folders, modules, classes and functions stay small enough to read at once."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.house.tree import modules, text, tree

MODULES_A_FOLDER = 15
MODULE_LINES = 400
CLASS_LINES = 300
FUNCTION_LINES = 70
WIDE: dict[str, str] = {
    "dashboards/rules.py": "a table of alerts",
    "stream_fabric/process/metric_names.py": "a table",
}
"""Modules that may be longer, with the reason."""


def test_no_folder_holds_more_modules_than_a_page_lists() -> None:
    folders = Counter(path.parent for path in modules() if path.name != "__init__.py")
    assert not [(str(path), count) for path, count in folders.items() if count > MODULES_A_FOLDER]


def test_no_module_is_longer_than_a_reader_holds() -> None:
    long = {str(path): lines for path in modules() if (lines := len(text(path).splitlines())) > MODULE_LINES}
    assert set(long) <= set(WIDE), {path: lines for path, lines in long.items() if path not in WIDE}


def test_no_exception_to_the_length_is_out_of_date() -> None:
    short = [path for path in WIDE if len(text(Path(path)).splitlines()) <= MODULE_LINES]
    assert not short, "these need no exception any more"


def test_no_class_is_longer_than_a_reader_holds() -> None:
    assert not [found for found in _sizes(ast.ClassDef) if found[1] > CLASS_LINES]


def test_no_function_is_longer_than_a_screen() -> None:
    assert not [found for found in _sizes(ast.FunctionDef, ast.AsyncFunctionDef) if found[1] > FUNCTION_LINES]


def test_no_wait_loses_a_cancel() -> None:
    """Until Python 3.12 ``asyncio.wait_for`` goes on when its task is cancelled as its future is done: take
    ``asyncio.timeout``."""
    assert not [f"{path}" for path in modules() if "asyncio.wait_for(" in text(path)]


def _sizes(*kinds: type[ast.AST]) -> Iterator[tuple[str, int]]:
    """(place, lines) of each definition of these kinds."""
    for path in modules():
        for node in ast.walk(tree(path)):
            if isinstance(node, kinds):
                assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                assert node.end_lineno is not None
                yield f"{path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1
