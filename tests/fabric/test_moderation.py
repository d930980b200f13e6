"""Moderation: rules, a real endpoint over HTTP, and what becomes of text that cannot be checked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from stream_fabric.errors import ModerationUnavailable
from stream_fabric.limits import MODERATION_INPUTS_MAX, MODERATION_PIECE_CHARS
from stream_fabric.moderation.moderator import open_moderator
from stream_fabric.moderation.rules import read_rules
from stream_fabric.moderation.settings import ModerationSettings
from stream_fabric.process.host import HostClock
from tests.support.moderation import ModerationServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ModerationServer]:
    async with ModerationServer.running("lease") as server:
        yield server


def rules_file(folder: Path, text: str) -> Path:
    path = folder / "rules.toml"
    path.write_text(text)
    return path


def test_rules_of_a_file(tmp_path: Path) -> None:
    rules = read_rules(
        rules_file(tmp_path, '[violence]\nwords = ["bad word", "c++"]\n[odd]\npatterns = ["(?i)b.mb", "x{3}"]')
    )
    assert rules.flagged("A BAD WORD.") == "violence"
    assert rules.flagged("a bomb") == "odd"
    assert rules.flagged("xxx") == "odd"
    assert rules.flagged("XXX, bad words and bumps, CATALOGUE of things") is None


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "0 patterns"),
        ('[a]\npatterns = ["("]', "no pattern of RE2"),
        ('[a]\npatterns = ["(a)\\\\1"]', "no pattern of RE2"),
        ('[a]\npatterns = ["x*"]', "matches the empty text"),
        ("[a]\nnames = []", "unknown field"),
        ("[a", "rules.toml"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        read_rules(rules_file(tmp_path, text))


def test_a_hostile_text_takes_linear_time(tmp_path: Path) -> None:
    """A backtracking engine would not end."""
    rules = read_rules(rules_file(tmp_path, '[a]\npatterns = ["(a+)+b"]'))
    assert rules.flagged("a" * 100_000) is None


def settings(**given: Any) -> ModerationSettings:
    return ModerationSettings(**given)


async def test_an_endpoint_is_asked_as_openais(server: ModerationServer) -> None:
    heard: list[str] = []
    asked = settings(moderation_url=server.url, moderation_key="sk-m", moderation_model="omni")
    async with open_moderator(asked, lambda outcome, seconds: heard.append(outcome), HostClock()) as moderator:
        assert moderator is not None and not moderator.is_local
        assert await moderator.check(["all is well", ""]) is None
        assert await moderator.check(["fine", "the lease"]) == "violence"
        long = "x" * (MODERATION_PIECE_CHARS * MODERATION_INPUTS_MAX * 2) + " the lease"
        assert await moderator.check([long]) == "violence"
    assert server.bodies[0] == {"input": ["all is well"], "model": "omni"}
    assert server.keys == {"Bearer sk-m"}
    assert all(len(body["input"]) <= MODERATION_INPUTS_MAX for body in server.bodies)
    assert heard == ["passed", "flagged", "flagged"]


async def test_rules_come_before_the_endpoint(server: ModerationServer, tmp_path: Path) -> None:
    path = rules_file(tmp_path, '[own]\nwords = ["lease"]')
    async with open_moderator(
        settings(moderation_url=server.url, moderation_rules_file=path), lambda *seen: None, HostClock()
    ) as moderator:
        assert moderator is not None
        assert await moderator.check(["the lease"]) == "own"
        assert not server.bodies


@pytest.mark.parametrize("trouble", ["status", "nonsense", "count", "late", "gone"])
async def test_what_cannot_be_checked_is_refused_or_passes(server: ModerationServer, trouble: str) -> None:
    server.trouble = trouble
    url = "http://127.0.0.1:1/v1/moderations" if trouble == "gone" else server.url
    for fail in ("closed", "open"):
        heard: list[str] = []
        asked = settings(moderation_url=url, moderation_timeout_s=0.2, moderation_fail=fail)
        async with open_moderator(asked, lambda outcome, seconds: heard.append(outcome), HostClock()) as moderator:  # noqa: B023
            assert moderator is not None
            async with asyncio.timeout(5):
                if fail == "open":
                    assert await moderator.check(["hello"]) is None
                else:
                    with pytest.raises(ModerationUnavailable):
                        await moderator.check(["hello"])
        assert heard == ["failed"]


async def test_nothing_configured_is_no_moderator() -> None:
    async with open_moderator(settings(), lambda *seen: None, HostClock()) as moderator:
        assert moderator is None
