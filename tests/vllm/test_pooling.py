"""Embeddings, rerank, classification and scores on the real vLLM."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
import pytest_asyncio

from inference.engines.vllm import VllmEngine
from stream_fabric.stream.frames import Open
from tests.vllm.real import SMALL, Direct, Home, ask, chat, request

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

FLAGS = (*SMALL, "--served-model-name", "tiny", "--kv-cache-memory-bytes", str(8 << 20))
EMBED: dict[str, Any] = {"model": "tiny", "input": ["a river", "a sea of stories"]}
CLASSIFY: dict[str, Any] = {"model": "tiny", "input": ["a river", "a stone"]}
SCORE: dict[str, Any] = {"model": "tiny", "queries": "water", "documents": ["a river", "a stone"]}
BODIES = {"embeddings": EMBED, "classify": CLASSIFY, "score": SCORE}
PATHS = {"classify": "/classify", "score": "/score"}
RERANK: dict[str, Any] = {"model": "tiny", "query": "water", "documents": ["a river", "a stone", "a cloud"]}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param(
            ("tiny", ("--runner", "pooling", "--convert", "embed"), ("embeddings", "rerank", "score")), id="embed"
        ),
        pytest.param(("tiny-score", (), ("rerank", "score", "classify")), id="score"),
        pytest.param(("tiny-classify", (), ("classify",)), id="classify", marks=pytest.mark.deep),
    ],
)
async def served(home: Home, request: pytest.FixtureRequest) -> AsyncIterator[tuple[VllmEngine, tuple[str, ...]]]:
    """An engine and the kinds it serves. Its start alone shows that the warm-up finds what the model does."""
    model, flags, kinds = request.param
    engine = home.engine((*FLAGS, *flags), model)
    await engine.start()
    assert engine.load().ready
    yield engine, kinds
    await engine.close()


@pytest.mark.parametrize("kind", ["embeddings", "rerank", "classify", "score"])
async def test_the_answer_is_the_server_s_own_document(
    served: tuple[VllmEngine, tuple[str, ...]], kind: Literal["embeddings", "rerank", "classify", "score"]
) -> None:
    engine, kinds = served
    body = BODIES.get(kind, RERANK)
    sink = await ask(engine, request(1, body, kind))
    if kind not in kinds:
        assert sink.error is not None
        assert sink.error.http_status in (400, 404)
        return
    assert engine.url is not None
    status, answer = await Direct(engine.url).post(PATHS.get(kind, f"/v1/{kind}"), body)
    assert status == 200
    expected, got = json.loads(answer), json.loads(sink.body("item"))
    for document in (expected, got):
        document.pop("id")
        document.pop("created", None)
    assert got == expected
    assert sink.opens() == [Open(0, 0, "item")]
    assert (sink.status, sink.tokens()) == ("completed", 0)
    assert sink.end_usage is not None
    assert sink.end_usage.prompt == expected["usage"]["prompt_tokens"] > 0


async def test_it_makes_no_tokens(served: tuple[VllmEngine, tuple[str, ...]]) -> None:
    sink = await ask(served[0], request(1, chat()))
    assert sink.error is not None
    assert (sink.error.http_status, sink.error.retriable) == (400, False)


async def test_too_long_a_question_is_refused_in_its_words(served: tuple[VllmEngine, tuple[str, ...]]) -> None:
    body = {**RERANK, "documents": ["river " * 9000]}
    if "rerank" not in served[1]:
        pytest.skip("a classifier of three classes ranks nothing")
    sink = await ask(served[0], request(1, body, "rerank"))
    assert sink.error is not None
    assert sink.error.http_status == 400
    assert "maximum context length" in sink.error.message
