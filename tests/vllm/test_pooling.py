"""Embeddings and rerank on the real vLLM."""

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
RERANK: dict[str, Any] = {"model": "tiny", "query": "water", "documents": ["a river", "a stone", "a cloud"]}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        pytest.param(("tiny", ("--runner", "pooling", "--convert", "embed"), ("embeddings", "rerank")), id="embed"),
        pytest.param(("tiny-score", (), ("rerank",)), id="score"),
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


@pytest.mark.parametrize("kind", ["embeddings", "rerank"])
async def test_the_answer_is_the_server_s_own_document(
    served: tuple[VllmEngine, tuple[str, ...]], kind: Literal["embeddings", "rerank"]
) -> None:
    engine, kinds = served
    body = EMBED if kind == "embeddings" else RERANK
    sink = await ask(engine, request(1, body, kind))
    if kind not in kinds:
        assert sink.error is not None
        assert sink.error.http_status == 404
        return
    assert engine.url is not None
    status, answer = await Direct(engine.url).post(f"/v1/{kind}", body)
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
    assert (sink.error.http_status, sink.error.retriable) == (404, False)


async def test_too_long_a_question_is_refused_in_its_words(served: tuple[VllmEngine, tuple[str, ...]]) -> None:
    body = {**RERANK, "documents": ["river " * 9000]}
    sink = await ask(served[0], request(1, body, "rerank"))
    assert sink.error is not None
    assert sink.error.http_status == 400
    assert "maximum context length" in sink.error.message
