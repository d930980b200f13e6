"""The repository's files as text and as syntax trees, for tests about how the code reads."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("stream_fabric", "stream_gw", "inference", "telemetry", "dashboards")


@cache
def files(*suffixes: str) -> tuple[Path, ...]:
    """Files of the repository with one of the suffixes, relative to its root; vendored and generated ones left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return tuple(
        path
        for path in map(Path, listed)
        if path.suffix in suffixes
        and "vendor" not in path.parts
        and not path.name.endswith(("_pb2.py", "_pb2.pyi"))
        and (ROOT / path).is_file()
    )


@cache
def text(path: Path) -> str:
    return (ROOT / path).read_text("utf-8")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


def modules() -> tuple[Path, ...]:
    """Python modules of the product, without its tests."""
    return tuple(path for path in files(".py") if path.parts[0] in PRODUCT)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring of a module, also those below an attribute or a constant."""
    for node in ast.walk(tree(path)):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for statement in body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    value = statement.value.value
                    if isinstance(value, str):
                        yield statement.lineno, value
