"""Official clients, one of each for a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dialects.canned import CannedAnthropic, CannedOpenAI


@pytest.fixture(scope="session")
def canned_openai() -> Iterator[CannedOpenAI]:
    made = CannedOpenAI()
    yield made
    made.close()


@pytest.fixture(scope="session")
def canned_anthropic() -> Iterator[CannedAnthropic]:
    made = CannedAnthropic()
    yield made
    made.close()
