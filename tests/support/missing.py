"""The end of a test whose programs are not installed."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skip the test. Fail it where ``CI`` is set: a skip there would hide that nothing was tested."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
