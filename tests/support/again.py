"""pytest plugin of ``.ci/run``: keeps the names of the failed tests in a file, and runs only those of a file.

A test of real processes can fail once because the machine stood still. CI runs it again alone, several times, and
says its name; it never passes over more than a few. Used with ``-p tests.support.again`` and two variables:
``STREAM_GW_FAILED_TESTS`` names the file to write, ``STREAM_GW_ONLY_TESTS`` the file to read.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_failed: dict[str, None] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed[report.nodeid] = None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the names only when all tests have run: after any other end nobody knows what the rest would do."""
    path = os.environ.get("STREAM_GW_FAILED_TESTS")
    is_worker = hasattr(session.config, "workerinput")
    if path and not is_worker and exitstatus == pytest.ExitCode.TESTS_FAILED:
        Path(path).write_text("".join(f"{name}\n" for name in _failed))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    path = os.environ.get("STREAM_GW_ONLY_TESTS")
    if not path or not collection_path.match("test_*.py"):
        return None
    files = {config.rootpath / name.partition("::")[0] for name in Path(path).read_text().splitlines()}
    return None if collection_path in files else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = os.environ.get("STREAM_GW_ONLY_TESTS")
    if path:
        names = set(Path(path).read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
        items[:] = [item for item in items if item.nodeid in names]
