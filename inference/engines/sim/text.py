"""The simulator's prompts and tokens. They depend on the request and the seed alone: runs are equal byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec

from inference.engines.sim.prose import tokens_of, topic_of

_VOCABULARY = (
    "the stream carries every token in order and a reader sees it once while the log keeps what was said naïve café "
    "über 流れる 日本語 поток 🙂"
)
_WORDS = tuple(_VOCABULARY.split())
"""Strings in JSON values."""
_BYTES_PER_TOKEN = 4
_VALUES_MAX = 1000
_ANY = {"type": "object", "properties": {"answer": {"type": "string"}}}


class Prompt:
    """A request's prompt: its bytes, its length in (simulated) tokens, and its digest."""

    def __init__(self, body: dict[str, Any], own_chars: int = 0) -> None:
        """``own_chars``: characters at the end of the prompt that an earlier replica has said of the answer."""
        self.body = body
        self.continued = ""
        """Output of the earlier replica, which the answer continues."""
        if "messages" in body:
            messages, begun = body["messages"], ""
            if body.get("continue_final_message") and messages[-1].get("role") == "assistant":
                *messages, last = messages
                begun = _content_text(last.get("content"))
            parts = [f"<{m.get('role')}>{_content_text(m.get('content'))}" for m in messages]
        else:
            begun, parts = _content_text(body.get("prompt")), []
        begun, self.continued = begun[: len(begun) - own_chars], begun[len(begun) - own_chars :]
        asked = "".join((*parts, begun)).encode("utf-8", "replace")
        self.digest = hashlib.blake2b(asked, digest_size=16).digest()
        self.last = parts[-1] if parts else begun
        """The last message, or the whole prompt of a completion."""
        self.data = asked + self.continued.encode("utf-8", "replace")
        self.tokens = max(1, len(self.data) // _BYTES_PER_TOKEN)

    def hashes(self, block_size: int) -> list[int]:
        """Hashes of the full blocks of tokens; each covers the blocks before it, and the cache salt."""
        size = block_size * _BYTES_PER_TOKEN
        chain = hashlib.blake2b(str(self.body.get("cache_salt") or "").encode("utf-8", "replace"), digest_size=8)
        out = []
        for start in range(0, len(self.data) - size + 1, size):
            chain.update(self.data[start : start + size])
            out.append(int.from_bytes(chain.digest(), "big"))
        return out

    def number(self, purpose: str, seed: int) -> int:
        """A number that depends on the prompt, the purpose and the seed."""
        return int.from_bytes(_digest(self.digest, purpose, seed)[:6], "big")


def prompts_of(body: dict[str, Any], own_chars: int = 0) -> list[Prompt]:
    """Return the prompts of a request: a completion may have several. ``own_chars``: as for a ``Prompt``."""
    given = body.get("prompt")
    if "messages" in body or not isinstance(given, list) or not given or isinstance(given[0], int):
        return [Prompt(body, own_chars)]
    return [Prompt({**body, "prompt": one}) for one in given]


def words(prompt: Prompt, seed: int) -> Iterator[str]:
    """Yield the tokens of a readable text that looks like what the prompt asks for, without end."""
    return tokens_of(topic_of(prompt.last), prompt.digest + seed.to_bytes(8, "big", signed=True) + bytes(1))


def skip(tokens: Iterator[str], text: str) -> tuple[int, Iterator[str]]:
    """Take the tokens that make up ``text``. Returns their number and the tokens after them.

    Raises ValueError when the tokens are another text.
    """
    count = 0
    while text:
        token = next(tokens)
        if not text.startswith(token):
            if token.startswith(text):  # its end was held back, because it might begin a stop string
                return count, chain([token[len(text) :]], tokens)
            raise ValueError("the simulator would have said something else")
        text = text[len(token) :]
        count += 1
    return count, tokens


def begins(tokens: Iterator[str], text: str) -> bool:
    """Return whether ``text`` is what the tokens begin with."""
    try:
        skip(tokens, text)
    except ValueError:
        return False
    return True


class StopText:
    """Holds text back as long as it may be the beginning of a stop string."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None

    def take(self, text: str, *, last: bool) -> str:
        """Return the text that can go out now.

        After a stop string was ``found`` that is all text before it; with the last token, all text.
        """
        held = self._held + text
        at, stop = min(((held.find(stop), stop) for stop in self._stops if stop in held), default=(-1, None))
        if stop is not None:
            self.found = stop
            return held[:at]
        if last:
            return held
        keep = max((self._matching_chars(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    @staticmethod
    def _matching_chars(held: str, stop: str) -> int:
        """Number of characters at the text's end that begin the stop string."""
        return next((size for size in range(min(len(stop) - 1, len(held)), 0, -1) if held.endswith(stop[:size])), 0)


def split_tokens(text: str) -> list[str]:
    """Split a given text into tokens of four characters."""
    return [text[i : i + _BYTES_PER_TOKEN] for i in range(0, len(text), _BYTES_PER_TOKEN)]


def json_like(schema: dict[str, Any] | None, prompt: Prompt, seed: int) -> str:
    """Return a JSON value that fits a simple schema. Raises ValueError when the value would be too large."""
    return msgspec.json.encode(_Values(prompt).value(schema or _ANY, seed)).decode()


class _Values:
    """Generates the values of one schema, within a limit: a small schema may ask for any number of values."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._left = _VALUES_MAX

    def value(self, schema: dict[str, Any], seed: int) -> Any:
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
                return {name: self.value(sub, seed + i) for i, (name, sub) in enumerate(properties)}
            case "array":
                return [self.value(schema.get("items", {}), seed + i) for i in range(schema.get("minItems", 2))]
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
    """Fictional but well-formed logprobs of one token, in OpenAI's format."""

    def item(text: str, rank: int) -> dict[str, Any]:
        return {"token": text, "logprob": -0.1 - rank, "bytes": list(text.encode())}

    first: dict[str, Any] = item(token, 0)
    first["top_logprobs"] = [item(token if rank == 0 else f"{token}{rank}", rank) for rank in range(top)]
    return msgspec.Raw(msgspec.json.encode([first]))


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part.get("text", "") if isinstance(part, dict) else str(part) for part in content)
    return ""


def _digest(key: bytes, purpose: str, seed: int) -> bytes:
    return hashlib.blake2b(purpose.encode() + seed.to_bytes(8, "big", signed=True), key=key, digest_size=16).digest()
