"""What the simulator says: text from the prompt and the seed alone, so that runs compare byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec

_VOCABULARY = (
    "the stream carries every token in order and the reader sees it once while a gateway holds only its cursor so "
    "that any other may continue where this one stopped because the log keeps what was said until somebody has read "
    "it whole naïve café über 流れる 日本語 поток 🙂 🚀 a slow client costs constant memory and its engine never waits "
    "for a lease expires within seconds then another replica answers with clear words about what happened"
)
_WORDS = tuple(_VOCABULARY.split())
_BREAKS = (
    "\n\n## On streams\n\n",
    "\n\n- first,",
    "\n- then,",
    "\n\n```python\nread(log)\n```\n\n",
    "\n\n1. **Note**:",
    "\n\n> Quoted:",
)
_BYTES_PER_TOKEN = 4
_VALUES_MAX = 1000
_ANY = {"type": "object", "properties": {"answer": {"type": "string"}}}


class Prompt:
    """A request's prompt: its bytes, its length in (made-up) tokens, and its digest."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.continued = ""
        """What of the answer has been said before: the request is to go on with it."""
        if "messages" in body:
            messages = body["messages"]
            if body.get("continue_final_message") and messages[-1].get("role") == "assistant":
                *messages, last = messages
                self.continued = _content(last.get("content"))
            parts = [f"<{m.get('role')}>{_content(m.get('content'))}" for m in messages]
        else:
            parts = [_content(body.get("prompt"))]
        asked = "".join(parts).encode("utf-8", "replace")
        self.digest = hashlib.blake2b(asked, digest_size=16).digest()
        self.data = asked + self.continued.encode("utf-8", "replace")
        self.tokens = max(1, len(self.data) // _BYTES_PER_TOKEN)

    def hashes(self, block_size: int) -> list[int]:
        """Of each full block of tokens, over it and all before it."""
        size = block_size * _BYTES_PER_TOKEN
        chain = hashlib.blake2b(digest_size=8)
        out = []
        for start in range(0, len(self.data) - size + 1, size):
            chain.update(self.data[start : start + size])
            out.append(int.from_bytes(chain.digest(), "big"))
        return out

    def number(self, purpose: str, seed: int) -> int:
        """A number that depends on the prompt, the purpose and the seed."""
        return int.from_bytes(_digest(self.digest, purpose, seed)[:6], "big")


def words(prompt: Prompt, seed: int, choice: int) -> Iterator[str]:
    """Tokens of readable nonsense with some markdown and multi-byte characters, without end."""
    block = 0
    capital, worded = True, 0
    while True:
        key = prompt.digest + seed.to_bytes(8, "big", signed=True) + bytes((choice,)) + block.to_bytes(4, "big")
        digest = hashlib.blake2b(key, digest_size=64).digest()
        for byte, other in zip(digest[::2], digest[1::2], strict=True):
            if worded >= 4 and byte > 248:
                capital, worded = True, 0
                yield _BREAKS[other % len(_BREAKS)]
            elif worded >= 4 and byte > 215:
                capital, worded = byte > 230, 0
                yield "." if capital else ","
            else:
                word = _WORDS[other % len(_WORDS)]
                yield " " + (word.capitalize() if capital else word)
                capital, worded = False, worded + 1
        block += 1


def skip(tokens: Iterator[str], text: str) -> tuple[int, Iterator[str]]:
    """Take the tokens that the text is made of: how many they were, and what follows them. Raises ValueError when they
    say something else."""
    count = 0
    while text:
        token = next(tokens)
        if not text.startswith(token):
            if token.startswith(text):  # its end was held back, for it might have begun a stop string
                return count, chain([token[len(text) :]], tokens)
            raise ValueError("the simulator would have said something else")
        text = text[len(token) :]
        count += 1
    return count, tokens


class StopText:
    """Text on its way out, held back for as long as it may be the beginning of a stop string."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None

    def take(self, text: str, *, last: bool) -> str:
        """The text that may leave; all that is left before a stop string once one is ``found``, or with the last."""
        held = self._held + text
        at, stop = min(((held.find(stop), stop) for stop in self._stops if stop in held), default=(-1, None))
        if stop is not None:
            self.found = stop
            return held[:at]
        if last:
            return held
        keep = max((self._begun(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    @staticmethod
    def _begun(held: str, stop: str) -> int:
        """How many characters of the stop string the text ends with."""
        return next((size for size in range(min(len(stop) - 1, len(held)), 0, -1) if held.endswith(stop[:size])), 0)


def pieces(text: str) -> list[str]:
    """A given text in tokens of four characters."""
    return [text[i : i + _BYTES_PER_TOKEN] for i in range(0, len(text), _BYTES_PER_TOKEN)]


def json_like(schema: dict[str, Any] | None, prompt: Prompt, seed: int) -> str:
    """A JSON value that fits a simple schema. Raises ValueError when it would be too large."""
    return msgspec.json.encode(_Values(prompt).of(schema or _ANY, seed)).decode()


class _Values:
    """Makes the values of one schema; a schema of a few bytes may ask for any number of them."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._left = _VALUES_MAX

    def of(self, schema: dict[str, Any], seed: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"the schema asks for more than {_VALUES_MAX} values")
        prompt = self._prompt
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return schema["enum"][prompt.number("enum", seed) % len(schema["enum"])]
        kind = schema.get("type")
        match kind[0] if isinstance(kind, list) else kind:
            case "object":
                properties = schema.get("properties", {}).items()
                return {name: self.of(sub, seed + i) for i, (name, sub) in enumerate(properties)}
            case "array":
                return [self.of(schema.get("items", {}), seed + i) for i in range(schema.get("minItems", 2))]
            case "integer":
                return prompt.number("integer", seed) % 100
            case "number":
                return prompt.number("number", seed) % 1000 / 10
            case "boolean":
                return bool(prompt.number("boolean", seed) % 2)
            case "null":
                return None
        return _WORDS[prompt.number("string", seed) % len(_WORDS)]


def logprobs(token: str, top: int) -> msgspec.Raw:
    """Made-up but well-formed logprobs of one token, in OpenAI's shape."""

    def item(text: str, rank: int) -> dict[str, Any]:
        return {"token": text, "logprob": -0.1 - rank, "bytes": list(text.encode())}

    first: dict[str, Any] = item(token, 0)
    first["top_logprobs"] = [item(token if rank == 0 else f"{token}{rank}", rank) for rank in range(top)]
    return msgspec.Raw(msgspec.json.encode([first]))


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part.get("text", "") if isinstance(part, dict) else str(part) for part in content)
    return ""


def _digest(key: bytes, purpose: str, seed: int) -> bytes:
    return hashlib.blake2b(purpose.encode() + seed.to_bytes(8, "big", signed=True), key=key, digest_size=16).digest()
