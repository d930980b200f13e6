"""Embeddings and rerank: one JSON document of the engine's, through real processes and byte for byte."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from inference.engines.sim.whole import Embeddings, Rerank, Whole
from stream_fabric.errors import EngineFailed, StreamTooLarge
from stream_fabric.limits import BATCH_MAX, ITEM_CHARS_MAX, STREAM_BYTES_MAX
from stream_fabric.stream.frames import ChoiceEnd, Close, End, Note, Open, encode, encode_text
from stream_fabric.stream.ids import StreamId
from stream_gw.dialects.whole import Document
from tests.gateway.conftest import Tenants
from tests.gateway.wire import MODEL, Gate, Reply, refusal
from tests.support.waiting import eventually

EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
TEXTS = ["the rivers of the north", "naïve café 流れる 🙂", "the rivers of the north"]
DOCUMENTS = ["mountains", "long rivers and the sea", {"text": "rivers"}, "ÜBER 流れる"]


def embed(given: Any = TEXTS, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": given, **more}


def rerank(query: str = "long rivers", documents: Any = DOCUMENTS, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "query": query, "documents": documents, **more}


def keyed(name: str) -> dict[str, str]:
    return {"idempotency-key": f"{name}-{time.time_ns()}"}


def computed(whole: Whole) -> bytes:
    """The bytes that the engine answers."""
    for part in whole.parts:
        assert not list(part.token())
    return whole.body()


def norm(vector: list[float]) -> float:
    return math.sqrt(sum(value * value for value in vector))


@pytest.fixture
def client(one: Gate) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0, timeout=20) as made:
        yield made


# --- OpenAI's client -----------------------------------------------------------------------------------------


def test_the_official_client_reads_both_encodings(client: OpenAI) -> None:
    asked = client.embeddings.create(model=MODEL, input=TEXTS)  # base64, unless told
    floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=TEXTS)
    assert isinstance(json.loads(raw.content)["data"][0]["embedding"], str)
    vectors = [item.embedding for item in asked.data]
    assert [item.embedding for item in floats.data] == vectors
    assert [item.index for item in asked.data] == [0, 1, 2]
    assert {len(vector) for vector in vectors} == {64}
    assert all(norm(vector) == pytest.approx(1, abs=1e-6) for vector in vectors)
    assert vectors[0] == vectors[2] != vectors[1]
    assert (asked.object, asked.model) == ("list", MODEL)
    assert asked.usage.prompt_tokens == asked.usage.total_tokens > 10
    assert asked.to_dict()["simulated"] is True


@pytest.mark.parametrize(
    ("given", "count"),
    [("one text", 1), ([1, 2, 3], 1), ([[1, 2], [3]], 2), ([str(k) for k in range(BATCH_MAX)], BATCH_MAX)],
    ids=["text", "tokens", "lists of tokens", "most"],
)
def test_the_official_clients_inputs(client: OpenAI, given: Any, count: int) -> None:
    answer = client.embeddings.create(model=MODEL, input=given, dimensions=4, user="u1")
    assert [item.index for item in answer.data] == list(range(count))
    assert {len(item.embedding) for item in answer.data} == {4}


def test_the_official_client_reads_a_refusal(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model=MODEL, input=[])
    assert raised.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="no-such-model", input="x")


# --- the bytes -----------------------------------------------------------------------------------------------


async def test_the_engines_bytes_are_the_answer(one: Gate, two: Gate) -> None:
    body = embed(dimensions=512)
    replies = await asyncio.gather(*(gate.ask("POST", EMBEDDINGS, body) for gate in (one, two)))
    for reply in replies:
        assert reply.status == 200
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-request-id"].startswith("req_")
        assert len(reply.body) > ITEM_CHARS_MAX, "more than one delta"
        assert reply.body == computed(Embeddings(body))
    assert len({reply.headers["x-stream-id"] for reply in replies}) == 2


async def test_a_rerank_in_order_of_the_scores(one: Gate) -> None:
    reply = await one.ask("POST", RERANK, rerank(top_n=3))
    assert reply.status == 200
    assert [(found["index"], found["relevance_score"]) for found in reply.json["results"]] == [(1, 1), (2, 0.5), (0, 0)]
    assert reply.json["results"][1]["document"] == {"text": "rivers"}
    assert reply.json["usage"]["total_tokens"] > 4
    assert (reply.json["model"], reply.json["simulated"]) == (MODEL, True)
    assert len((await one.ask("POST", RERANK, rerank())).json["results"]) == len(DOCUMENTS)


async def test_a_document_of_every_character_passes_unchanged(one: Gate) -> None:
    """A document is cut into deltas within its characters, and escaped twice."""
    odd = '"\\\n\t\x00\x1f\x7f\u2028é流🙂' * 5000
    body = rerank(odd[:200], [odd, "x" + odd, {"text": "xx" + odd}])
    reply = await one.ask("POST", RERANK, body)
    assert reply.status == 200
    assert reply.body == computed(Rerank(StreamId(reply.headers["x-stream-id"]), body))


# --- who may, and what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        (EMBEDDINGS, embed([]), "invalid_request", "input"),
        (EMBEDDINGS, embed(["x"] * (BATCH_MAX + 1)), "invalid_request", "input"),
        (EMBEDDINGS, {"model": MODEL}, "invalid_request", "input"),
        (EMBEDDINGS, embed(encoding_format="bytes"), "invalid_request", "encoding_format"),
        (EMBEDDINGS, embed(stream=True), "unsupported", "stream"),
        (EMBEDDINGS, b"{", "invalid_request", None),
        (EMBEDDINGS, b'{"x":' + b"[" * 70 + b"]" * 70 + b"}", "json_too_deep", None),
        (RERANK, rerank(documents=[]), "invalid_request", "documents"),
        (RERANK, rerank(documents=[{"title": "x"}]), "invalid_request", "documents"),
        (RERANK, rerank(documents=["x"] * (BATCH_MAX + 1)), "invalid_request", "documents"),
        (RERANK, {"model": MODEL, "documents": ["x"]}, "invalid_request", "query"),
        (RERANK, rerank(top_n=-1), "invalid_request", "top_n"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_refused(one: Gate, path: str, body: Any, code: str, param: str | None) -> None:
    assert refusal(await one.ask("POST", path, body), 400, code)["param"] == param


@pytest.mark.parametrize(("path", "body"), [(EMBEDDINGS, embed()), (RERANK, rerank())])
async def test_who_may_ask(tenants: Tenants, path: str, body: dict[str, Any]) -> None:
    acme = tenants.acme
    refusal(await acme.ask("POST", path, body, {"authorization": "Bearer sk-nobody"}), 401, "invalid_api_key")
    refusal(await tenants.acme_reader.ask("POST", path, body), 403, "forbidden")
    refusal(await tenants.acme_other_model.ask("POST", path, body), 404, "model_not_found")
    refusal(await acme.ask("POST", path, body | {"model": "no-such-model"}), 404, "model_not_found")
    refusal(await acme.ask("GET", path), 405, "method_not_allowed")
    refusal(await acme.ask("POST", "/v2/rerank", body), 404, "not_found")
    assert (await acme.ask("POST", path, body)).status == 200


async def test_an_engines_refusal_is_the_answer(one: Gate) -> None:
    """One input has more tokens than a replica's cache holds."""
    refusal(await one.ask("POST", EMBEDDINGS, embed("x" * (1 << 22))), 400, "context_length_exceeded")


async def test_an_answer_beyond_the_largest_stream_fails(one: Gate) -> None:
    body = embed([str(k) for k in range(1000)], dimensions=1000)
    refusal(await one.ask("POST", EMBEDDINGS, body), 502, "stream_too_large")


# --- its stream ----------------------------------------------------------------------------------------------


async def test_its_stream_is_its_tenants_and_cannot_be_followed(tenants: Tenants) -> None:
    acme, globex = tenants.acme, tenants.globex
    for path, body in ((EMBEDDINGS, embed()), (RERANK, rerank())):
        stream = (await acme.ask("POST", path, body)).headers["x-stream-id"]
        refusal(await globex.ask("GET", f"/v1/streams/{stream}"), 404, "not_found")
        refusal(await globex.ask("GET", f"/v1/streams/{stream}/info"), 404, "not_found")
        info = await acme.info(stream)
        assert (info["status"], info["model"]) == ("completed", MODEL)
        for query in ("", "?dialect=openai.chat", "?after=1-1"):
            error = refusal(await acme.ask("GET", f"/v1/streams/{stream}{query}"), 400, "unsupported")
            assert path in error["message"] and "Idempotency-Key" in error["message"]
        assert (await acme.ask("HEAD", f"/v1/streams/{stream}")).status == 400
        placed = (await acme.ask("GET", f"/v1/streams/{stream}/placement")).json
        assert placed["placements"][0]["output_tokens"] == 1


async def test_a_socket_is_told_as_well(one: Gate) -> None:
    stream = (await one.ask("POST", EMBEDDINGS, embed())).headers["x-stream-id"]
    async with one.socket() as socket:
        for channel, mode in enumerate(("tokens", "snapshot"), 1):
            await socket.sub(channel, stream, mode=mode)
            told = await socket.until(lambda message: "ch" in message)
            assert (told["t"], told["ch"], told["code"]) == ("error", channel, "unsupported")


async def test_a_key_gives_the_same_bytes_again(one: Gate, two: Gate) -> None:
    for path, body in ((EMBEDDINGS, embed()), (RERANK, rerank())):
        key = keyed("again")
        replies = await asyncio.gather(*(gate.ask("POST", path, body, key) for gate in (one, two, one)))
        replies.append(await two.ask("POST", path, body, key))
        assert {reply.status for reply in replies} == {200}
        assert len({reply.headers["x-stream-id"] for reply in replies}) == 1
        assert len({reply.body for reply in replies}) == 1
        refusal(await two.ask("POST", path, body | {"user": "another"}, key), 422, "idempotency_mismatch")


async def test_a_key_is_of_one_kind(one: Gate, two: Gate) -> None:
    """A body that three endpoints would take."""
    body = embed() | rerank() | {"prompt": "x", "max_tokens": 2}
    paths = (EMBEDDINGS, RERANK, "/v1/completions")
    for first in paths:
        key = keyed("kind")
        assert (await one.ask("POST", first, body, key)).status == 200
        for other in paths:
            reply: Reply = await two.ask("POST", other, body, key)
            if other == first:
                assert reply.status == 200
            else:
                refusal(reply, 422, "idempotency_mismatch")


@pytest.mark.parametrize(
    ("path", "body"),
    [(EMBEDDINGS, embed("x" * (1 << 20))), (RERANK, rerank(documents=["x" * (1 << 20)]))],
    ids=["embeddings", "rerank"],
)
async def test_a_client_that_leaves_cancels_it(one: Gate, two: Gate, path: str, body: dict[str, Any]) -> None:
    user = f"embedder-{time.time_ns()}"
    async with one.connection() as exchange:
        await exchange.send(one.request("POST", path, body | {"user": user}))  # 13 s of prefill

        async def running_there() -> Any:
            return (await two.ask("GET", f"/v1/streams?user={user}")).json["data"]

        (stream,) = await eventually(running_there, "the stream to run")
    await two.until_status(stream["id"], "cancelled", 6)


async def test_a_cancel_ends_it_with_an_error(one: Gate, two: Gate) -> None:
    user = f"embedder-{time.time_ns()}"
    async with one.connection() as exchange:
        await exchange.send(one.request("POST", EMBEDDINGS, embed("x" * (1 << 20), user=user)))

        async def running_there() -> Any:
            return (await two.ask("GET", f"/v1/streams?user={user}")).json["data"]

        (stream,) = await eventually(running_there, "the stream to run")
        assert (await two.cancel(stream["id"]))["result"] in ("accepted", "pending")
        reply = await exchange.answer()
    refusal(reply, 499, "cancelled")


# --- the document, from frames -------------------------------------------------------------------------------


def gathered(*lines: bytes) -> Document:
    document = Document()
    for line in lines:
        document.add(line)
    return document


def test_the_document_is_the_items_text() -> None:
    text = '{"a":"\\u0000\\"é流🙂"}'
    before = encode(Note("prompt", prompt_tokens=3))
    pieces = [encode_text(0, letter, 0) for letter in text]
    after = [encode(frame) for frame in (Close(0), ChoiceEnd(0, "stop"), End("completed"))]
    assert gathered(before, encode(Open(0, 0, "item")), *pieces, *after).result() == text.encode()


def test_other_text_is_no_document() -> None:
    document = gathered(encode(Open(0, 0, "text")), encode_text(0, "words"), encode(Close(0)))
    with pytest.raises(EngineFailed, match="without a response"):
        document.result()
    document.add(encode(Open(1, 0, "item")))
    document.add(encode_text(0, "words"))
    document.add(encode_text(1, "{}", 0))
    assert document.result() == b"{}"


def test_a_document_is_kept_up_to_the_largest() -> None:
    piece = encode_text(0, "é" * (1 << 16), 0)
    document = gathered(encode(Open(0, 0, "item")), *[piece] * (STREAM_BYTES_MAX >> 17))
    assert len(document.result()) == STREAM_BYTES_MAX
    document.add(encode_text(0, "x", 0))
    document.add(piece)
    with pytest.raises(StreamTooLarge):
        document.result()
    assert not document._pieces
