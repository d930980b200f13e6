"""Classification and scores: one JSON document of the engine's, through real processes and byte for byte."""

from __future__ import annotations

import time
from typing import Any

import pytest

from inference.engines.sim.whole import Classification, Scores, Whole
from stream_fabric.stream.ids import StreamId
from tests.gateway.wire import MODEL, Gate

CLASSIFY: dict[str, Any] = {"model": MODEL, "input": ["a fine day", "naïve 流れる 🙂", "a fine day"]}
SCORE: dict[str, Any] = {"model": MODEL, "queries": "long rivers", "documents": ["rivers", "long rivers", "a stone"]}


def computed(whole: Whole) -> bytes:
    """The bytes that the engine answers."""
    for part in whole.parts:
        assert not list(part.token())
    return whole.body()


async def test_texts_are_classified(one: Gate, two: Gate) -> None:
    for gate in (one, two):
        reply = await gate.ask("POST", "/v1/classify", CLASSIFY)
        assert reply.status == 200
        assert reply.body == computed(Classification(StreamId(reply.headers["x-stream-id"]), CLASSIFY))
        assert [found["index"] for found in reply.json["data"]] == [0, 1, 2]
        for found in reply.json["data"]:
            assert sum(found["probs"]) == pytest.approx(1)
            assert found["num_classes"] == len(found["probs"]) == 3
        assert reply.json["data"][0]["probs"] == reply.json["data"][2]["probs"] != reply.json["data"][1]["probs"]
        assert abs(reply.json["created"] - time.time()) < 60
        assert reply.json["usage"]["prompt_tokens"] > 3


async def test_a_chat_is_classified_as_one_input(one: Gate) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    reply = await one.ask("POST", "/v1/classify", body)
    assert reply.status == 200 and len(reply.json["data"]) == 1


async def test_pairs_are_scored(one: Gate) -> None:
    reply = await one.ask("POST", "/v1/score", SCORE)
    assert reply.status == 200
    assert reply.body == computed(Scores(StreamId(reply.headers["x-stream-id"]), SCORE))
    assert [(found["index"], found["score"]) for found in reply.json["data"]] == [(0, 0.5), (1, 1), (2, 0)]
    assert {found["object"] for found in reply.json["data"]} == {"score"}
    pairs = {"model": MODEL, "text_1": ["rivers", "stone"], "text_2": ["stone", "stone"]}
    assert [found["score"] for found in (await one.ask("POST", "/v1/score", pairs)).json["data"]] == [0, 1]


@pytest.mark.parametrize(("path", "body"), [("/v1/classify", CLASSIFY), ("/v1/score", SCORE)])
async def test_it_is_a_stream_like_any_other(one: Gate, two: Gate, path: str, body: dict[str, Any]) -> None:
    key = {"idempotency-key": f"pooling-{path}-{time.time_ns()}"}
    first = await one.ask("POST", path, body, headers=key)
    again = await two.ask("POST", path, body, headers=key)
    assert again.body == first.body and again.headers["x-stream-id"] == first.headers["x-stream-id"]
    stream = first.headers["x-stream-id"]
    assert (await two.ask("GET", f"/v1/streams/{stream}/info")).json["status"] == "completed"
    followed = await two.ask("GET", f"/v1/streams/{stream}")
    assert (followed.status, followed.json["error"]["code"]) == (400, "unsupported")
    other = await one.ask("POST", "/v1/embeddings", {"model": MODEL, "input": "x"}, headers=key)
    assert (other.status, other.json["error"]["code"]) == (422, "idempotency_mismatch")
    streamed = await one.ask("POST", path, {**body, "stream": True})
    assert (streamed.status, streamed.json["error"]["param"]) == (400, "stream")
