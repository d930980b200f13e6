"""Endpoints of other services: a 404 that says what to use instead, before authentication, without the body."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import websockets
from openai import NotFoundError, OpenAI
from websockets.exceptions import InvalidStatus

from stream_gw.dialects.parsers import PATHS
from stream_gw.transport.reference.operations import OPERATIONS
from stream_gw.transport.reference.unserved import UNSERVED, unserved
from tests.gateway.wire import Gate

DOCS = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"


def test_no_route_of_ours_counts_as_missing() -> None:
    for path in (*PATHS, *(operation.path for operation in OPERATIONS)):
        assert unserved(path) is None, path


def test_every_advice_names_paths_that_exist() -> None:
    ours = {*PATHS, *(operation.path for operation in OPERATIONS), "/v1/stream"}
    for path, advice in UNSERVED.items():
        named = [word.strip(";,") for word in advice.split() if word.startswith("/v1/")]
        assert set(named) <= ours, path


def test_the_docs_list_the_same() -> None:
    rows = {line.split("`")[1]: line for line in DOCS.read_text().splitlines() if line.startswith("| `/v1/")}
    assert {path for path in rows if path in UNSERVED} == set(UNSERVED)
    for path, advice in UNSERVED.items():
        assert advice in rows[path].replace("`", ""), path


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v1/audio", "/v1/audio"),
        ("/v1/audio/transcriptions", "/v1/audio"),
        ("/v1/threads/t/runs/r/steps/s" + "/x" * 2000, "/v1/threads"),
        ("/v1/messages/batches/b/results", "/v1/messages/batches"),
        ("/v1/messages/other", None),
        ("/v1/audiobooks", None),
        ("/audio", None),
        ("", None),
    ],
)
def test_a_path_is_found_by_its_beginning(path: str, found: str | None) -> None:
    error = unserved(path)
    assert (None if error is None else error.message.split()[0]) == found


@pytest.mark.parametrize("path", sorted(UNSERVED))
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_it_is_told_without_a_key(one: Gate, path: str, method: str) -> None:
    body = {"x": "y" * 100_000} if method == "POST" else None
    stranger = Gate(one.url, one.pid, "")
    reply = await stranger.ask(method, f"{path}/some/thing", body)
    assert reply.status == 404
    error = reply.json["error"]
    assert error["code"] == "not_served" and error["retriable"] is False
    assert error["message"] == f"{path} is not served here; {UNSERVED[path]}"
    anthropic = path.startswith("/v1/messages/")
    assert error["type"] == ("not_found_error" if anthropic else "invalid_request_error")
    told = await stranger.ask(method, f"{path}/some/thing", body, headers={"anthropic-version": "2023-06-01"})
    assert told.json["type"] == "error" and told.json["error"]["type"] == "not_found_error"


def test_the_official_client_reads_it(one: Gate) -> None:
    with OpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0, timeout=20) as client:
        with pytest.raises(NotFoundError) as files:
            client.files.list()
        with pytest.raises(NotFoundError) as images:
            client.images.generate(prompt="a river", model="x")
        with pytest.raises(NotFoundError) as jobs:
            client.fine_tuning.jobs.list()
    assert [raised.value.code for raised in (files, images, jobs)] == ["not_served"] * 3


async def test_the_realtime_socket_is_refused_with_the_same_words(one: Gate) -> None:
    host = urlsplit(one.url).netloc
    with pytest.raises(InvalidStatus) as refused:
        await websockets.connect(f"ws://{host}/v1/realtime?model=x")
    assert refused.value.response.status_code == 404
    assert b"/v1/stream, which carries text" in refused.value.response.body


async def test_it_costs_no_more_than_another_missing_path(one: Gate) -> None:
    stranger = Gate(one.url, one.pid, "")

    async def best(path: str) -> float:
        times = []
        for _ in range(30):
            begun = time.perf_counter()
            await stranger.ask("GET", path)
            times.append(time.perf_counter() - begun)
        return min(times)

    missing, known = await best("/v1/nothing/at/all"), await best("/v1/threads/t/runs")
    assert known < missing * 3 + 0.005
