"""Simulated answers that are one JSON document (pooling, token counts). They depend on the inputs alone."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from inference.engines.sim.answer import Piece
from inference.engines.sim.text import Prompt
from stream_fabric.pool.records import EngineRequest
from stream_fabric.stream.ids import StreamId, created_ms, derived_id

_DIMENSIONS = 64
_DIMENSIONS_MAX = 4096
_NUMBERS_MAX = 1 << 20
"""Maximum numbers in all vectors of one answer."""
_WORD = re.compile(r"\w+")
_SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""Names of the two sides of a score."""


class Part:
    """One input of an embedding or rerank request, which the replica computes as a prompt of its own."""

    length = 1
    block = thought = 0

    def __init__(self, number: int, prompt_tokens: int, compute: Callable[[int], None]) -> None:
        self.choice = number
        self.prompt_tokens = prompt_tokens
        self.tokens_made = 0
        self.ended = False
        self._compute = compute

    def token(self) -> Iterator[Piece]:
        """Compute the part's result; return no output, because the answer goes out after all parts."""
        self.tokens_made, self.ended = 1, True
        self._compute(self.choice)
        return iter(())

    def tokens_since_text(self) -> int:
        return 0

    def hashes(self, block_size: int) -> list[int]:
        return []  # two inputs share no KV cache


class Whole(Protocol):
    """An answer that goes out when its last part has ended."""

    prompt: Prompt
    parts: Sequence[Part]

    def body(self) -> bytes: ...


def _joined_prompt(inputs: list[str], parts: Sequence[Part]) -> Prompt:
    """Join all inputs into one prompt, which gives the number of tokens and whether the request must fail."""
    prompt = Prompt({"prompt": "\0".join(inputs)})
    prompt.tokens = sum(part.prompt_tokens for part in parts)
    return prompt


def _count_tokens(text: str) -> int:
    return Prompt({"prompt": text}).tokens


def _document(model: str, tokens: int, **fields: Any) -> bytes:
    """Encode the answer's JSON document with its usage."""
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({**fields, "model": model, "usage": usage, "simulated": True})


def _inputs(given: Any) -> tuple[list[str], list[int]]:
    """Return the texts and token counts of a text, token ids, or a list of texts or of lists of token ids."""
    inputs = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    texts = [one if isinstance(one, str) else " ".join(map(str, one)) for one in inputs]
    return texts, [_count_tokens(one) if isinstance(one, str) else len(one) for one in inputs]


def _created(stream: StreamId) -> int:
    return created_ms(stream) // 1000


class Embeddings:
    """Answer with unit vectors: equal for equal inputs, unrelated for different ones."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._model = str(body["model"])
        self._inputs, sizes = _inputs(body["input"])
        self._format = body.get("encoding_format") or "float"
        dimensions = body.get("dimensions")
        self._dimensions: int = _DIMENSIONS if dimensions is None else int(dimensions)
        if self._format not in ("float", "base64"):
            raise ValueError(f"encoding_format is float or base64, got {self._format!r}")
        if not 1 <= self._dimensions <= _DIMENSIONS_MAX or self._dimensions * len(sizes) > _NUMBERS_MAX:
            raise ValueError(f"1 to {_DIMENSIONS_MAX} dimensions, and {_NUMBERS_MAX} numbers in all")
        self._data: list[dict[str, Any]] = [{} for _ in sizes]
        self.parts: Sequence[Part] = [Part(k, size, self._compute) for k, size in enumerate(sizes)]
        self.prompt = _joined_prompt(self._inputs, self.parts)

    def _compute(self, number: int) -> None:
        count = self._dimensions
        drawn = hashlib.shake_256(self._inputs[number].encode("utf-8", "replace")).digest(2 * count)
        # Odd numbers, so that not all are 0
        numbers = [2 * value + 1 for value in struct.unpack(f"<{count}h", drawn)]
        size = math.hypot(*numbers)
        packed = struct.pack(f"<{count}f", *(value / size for value in numbers))
        vector = base64.b64encode(packed).decode() if self._format == "base64" else struct.unpack(f"<{count}f", packed)
        self._data[number] = {"object": "embedding", "index": number, "embedding": vector}

    def body(self) -> bytes:
        return _document(self._model, self.prompt.tokens, object="list", data=self._data)


class Rerank:
    """Answer that scores documents by the share of the query's words in them."""

    def __init__(self, stream: StreamId, body: dict[str, Any]) -> None:
        self._model, self._stream = str(body["model"]), stream
        self._documents: list[str] = [one if isinstance(one, str) else one["text"] for one in body["documents"]]
        query = body["query"]
        self._words = set(_WORD.findall(query.casefold()))
        self._scores = [0.0] * len(self._documents)
        self._top = int(body.get("top_n") or 0) or len(self._documents)
        if self._top < 0:
            raise ValueError(f"top_n must be at least 0, got {self._top}")
        asked = _count_tokens(query)
        self.parts: Sequence[Part] = [
            Part(k, asked + _count_tokens(text), self._compute) for k, text in enumerate(self._documents)
        ]
        if not self.parts:
            raise ValueError("there are no documents")
        self.prompt = _joined_prompt([query, *self._documents], self.parts)

    def _compute(self, number: int) -> None:
        shared = self._words.intersection(_WORD.findall(self._documents[number].casefold()))
        self._scores[number] = len(shared) / max(1, len(self._words))

    def body(self) -> bytes:
        best = sorted(range(len(self._scores)), key=lambda number: (-self._scores[number], number))
        results = [
            {"index": k, "document": {"text": self._documents[k]}, "relevance_score": self._scores[k]}
            for k in best[: self._top]
        ]
        name = derived_id("rerank-", self._stream)
        return _document(self._model, self.prompt.tokens, id=name, results=results)


_LABELS = ("negative", "neutral", "positive")


class Classification:
    """Answer that classifies texts into three classes, with probabilities that depend on the text alone."""

    def __init__(self, stream: StreamId, body: dict[str, Any]) -> None:
        self._model, self._stream = str(body["model"]), stream
        if body.get("messages"):
            inputs = [Prompt({"messages": body["messages"]}).data.decode("utf-8", "replace")]
            sizes = [_count_tokens(inputs[0])]
        else:
            inputs, sizes = _inputs(body["input"])
        if not inputs:
            raise ValueError("there is no input")
        self._inputs = inputs
        self._data: list[dict[str, Any]] = [{} for _ in inputs]
        self.parts: Sequence[Part] = [Part(k, size, self._compute) for k, size in enumerate(sizes)]
        self.prompt = _joined_prompt(inputs, self.parts)

    def _compute(self, number: int) -> None:
        drawn = hashlib.shake_256(self._inputs[number].encode("utf-8", "replace")).digest(len(_LABELS))
        weights = [1 + value for value in drawn]
        probs = [weight / sum(weights) for weight in weights]
        label = _LABELS[probs.index(max(probs))]
        self._data[number] = {"index": number, "label": label, "probs": probs, "num_classes": len(_LABELS)}

    def body(self) -> bytes:
        name = derived_id("classify-", self._stream)
        return _document(
            self._model, self.prompt.tokens, id=name, object="list", created=_created(self._stream), data=self._data
        )


class Scores:
    """Answer that scores pairs of texts by the share of the left one's words in the right one."""

    def __init__(self, stream: StreamId, body: dict[str, Any]) -> None:
        self._model, self._stream = str(body["model"]), stream
        left, right = next([body[name] for name in pair] for pair in _SIDES if all(name in body for name in pair))
        lefts, rights = (_inputs(side)[0] for side in (left, right))
        if len(lefts) not in (1, len(rights)) or not rights:
            raise ValueError("the left side has one text, or as many as the right one")
        self._pairs = list(zip(lefts * len(rights) if len(lefts) == 1 else lefts, rights, strict=True))
        self._scores = [0.0] * len(self._pairs)
        self.parts: Sequence[Part] = [
            Part(k, _count_tokens(one) + _count_tokens(other), self._compute)
            for k, (one, other) in enumerate(self._pairs)
        ]
        self.prompt = _joined_prompt([*lefts, *rights], self.parts)

    def _compute(self, number: int) -> None:
        one, other = (set(_WORD.findall(text.casefold())) for text in self._pairs[number])
        self._scores[number] = len(one & other) / max(1, len(one))

    def body(self) -> bytes:
        data = [{"index": k, "object": "score", "score": score} for k, score in enumerate(self._scores)]
        name = derived_id("score-", self._stream)
        return _document(
            self._model, self.prompt.tokens, id=name, object="list", created=_created(self._stream), data=data
        )


class TokenCount:
    """Answer with the number of a prompt's simulated tokens."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.prompt = Prompt(body)
        self._tokens, self.prompt.tokens = self.prompt.tokens, 0  # nothing is computed, so nothing is billed
        self.parts: Sequence[Part] = [Part(0, 1, lambda number: None)]

    def body(self) -> bytes:
        return msgspec.json.encode({"count": self._tokens, "simulated": True})


def whole_answer(request: EngineRequest, body: dict[str, Any]) -> Whole | None:
    """Make the answer of a request that is answered by one document; None: it is answered by tokens."""
    match request.kind:
        case "embeddings":
            return Embeddings(body)
        case "rerank":
            return Rerank(request.stream, body)
        case "classify":
            return Classification(request.stream, body)
        case "score":
            return Scores(request.stream, body)
        case "tokenize":
            return TokenCount(body)
    return None
