"""What the simulator answers to embeddings and rerank: one JSON document, from the inputs alone."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from inference.agent.engines.sim.answer import Piece
from inference.agent.engines.sim.text import Prompt
from stream_fabric.ids import StreamId, derived_id

_DIMENSIONS = 64
_DIMENSIONS_MAX = 4096
_NUMBERS_MAX = 1 << 20
"""Of one answer's vectors together."""
_WORD = re.compile(r"\w+")


class Part:
    """One input: a prompt of its own to the replica. What it gives is computed when its prefill has ended."""

    length = 1
    block = 0

    def __init__(self, number: int, prompt_tokens: int, compute: Callable[[int], None]) -> None:
        self.choice = number
        self.prompt_tokens = prompt_tokens
        self.tokens_made = 0
        self.ended = False
        self._compute = compute

    def token(self) -> Iterator[Piece]:
        """Nothing leaves before all parts have ended."""
        self.tokens_made, self.ended = 1, True
        self._compute(self.choice)
        return iter(())

    def untold(self) -> int:
        return 0


class Whole(Protocol):
    """An answer that leaves when its last part has ended."""

    prompt: Prompt
    parts: Sequence[Part]

    def body(self) -> bytes: ...


def _prompt(inputs: list[str], parts: Sequence[Part]) -> Prompt:
    """All inputs as one, which tells how many tokens they have and whether the request is to fail."""
    prompt = Prompt({"prompt": "\0".join(inputs)})
    prompt.tokens = sum(part.prompt_tokens for part in parts)
    return prompt


def _tokens(text: str) -> int:
    return Prompt({"prompt": text}).tokens


def _spelled(model: str, tokens: int, **fields: Any) -> bytes:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({**fields, "model": model, "usage": usage, "simulated": True})


class Embeddings:
    """Unit vectors; equal inputs have equal ones, and others have nothing in common."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._model = str(body["model"])
        given = body["input"]
        inputs = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
        self._format = body.get("encoding_format") or "float"
        dimensions = body.get("dimensions")
        self._dimensions: int = _DIMENSIONS if dimensions is None else int(dimensions)
        if self._format not in ("float", "base64"):
            raise ValueError(f"encoding_format is float or base64, got {self._format!r}")
        if not 1 <= self._dimensions <= _DIMENSIONS_MAX or self._dimensions * len(inputs) > _NUMBERS_MAX:
            raise ValueError(f"1 to {_DIMENSIONS_MAX} dimensions, and {_NUMBERS_MAX} numbers in all")
        self._inputs = [text if isinstance(text, str) else " ".join(map(str, text)) for text in inputs]
        self._data: list[dict[str, Any]] = [{} for _ in inputs]
        self.parts: Sequence[Part] = [
            Part(k, _tokens(one) if isinstance(one, str) else len(one), self._compute) for k, one in enumerate(inputs)
        ]
        self.prompt = _prompt(self._inputs, self.parts)

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
        return _spelled(self._model, self.prompt.tokens, object="list", data=self._data)


class Rerank:
    """A document's score is the share of the query's words that it has."""

    def __init__(self, stream: StreamId, body: dict[str, Any]) -> None:
        self._model, self._stream = str(body["model"]), stream
        self._documents: list[str] = [one if isinstance(one, str) else one["text"] for one in body["documents"]]
        query = body["query"]
        self._words = set(_WORD.findall(query.casefold()))
        self._scores = [0.0] * len(self._documents)
        self._top = int(body.get("top_n") or 0) or len(self._documents)
        if self._top < 0:
            raise ValueError(f"top_n must be at least 0, got {self._top}")
        asked = _tokens(query)
        self.parts: Sequence[Part] = [
            Part(k, asked + _tokens(text), self._compute) for k, text in enumerate(self._documents)
        ]
        if not self.parts:
            raise ValueError("there are no documents")
        self.prompt = _prompt([query, *self._documents], self.parts)

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
        return _spelled(self._model, self.prompt.tokens, id=name, results=results)
