"""Prompts of a workload: conversations of synthetic text with known lengths, the same for the same seed."""

from __future__ import annotations

import math
import random
from codecs import BOM_UTF8
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

from inference.simulate.traces import TRACE_BLOCK_TOKENS, Request

_COMMON = (
    "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word "
    "but not what all were we when your can said there use an each which she do how their if will up other about out "
    "many then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part"
)
"""Short English words that most tokenizers make one token of."""
_WORDS = _COMMON.split()
_IDLE_SESSIONS_MAX = 10_000
_ANSWER_CHARS_MAX = 1 << 16


class Lengths(NamedTuple):
    """A lognormal distribution of lengths in tokens."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        return round(min(max(math.exp(rng.gauss(math.log(self.median), self.sigma)), self.least), self.most))


class Profile(NamedTuple):
    """A kind of traffic."""

    about: str
    system_tokens: int
    """Length of the system prompt, which all sessions share."""
    prompt: Lengths
    """Length of what a turn adds to the conversation."""
    answer: Lengths
    turns: int
    """Turns of a session."""


PROFILES = {
    "chat": Profile(
        "people who talk: short questions, some hundred tokens of answer, four turns with a growing history",
        120, Lengths(60, 0.8, 8, 2000), Lengths(180, 0.7, 8, 1500), 4,
    ),
    "rag": Profile(
        "questions about documents: thousands of prompt tokens that differ each time, short answers, one turn",
        150, Lengths(3000, 0.4, 500, 12_000), Lengths(150, 0.6, 8, 800), 1,
    ),
    "agent": Profile(
        "tool loops: a long shared system prompt, twelve turns with short answers, the history as prefix",
        1500, Lengths(300, 0.8, 16, 4000), Lengths(60, 0.6, 8, 400), 12,
    ),
    "batch": Profile(
        "documents one by one: no system prompt, no history, long prompts and answers",
        0, Lengths(800, 0.6, 32, 8000), Lengths(400, 0.5, 16, 2000), 1,
    ),
}  # fmt: skip


class Turn(NamedTuple):
    """One request to send. ``tokens``: length of the answer that is asked for."""

    session: int
    number: int
    messages: list[dict[str, Any]]
    tokens: int


class Workload(Protocol):
    def next_turn(self) -> Turn:
        """Return the next request."""

    def finish(self, turn: Turn, answer: str | None) -> None:
        """Take the answer of a turn, which the session's next turn repeats. None: it failed, the session is over."""


class Sessions:
    """Turns of a profile's sessions. A session that waits for its next turn goes before a new one.

    ``words_per_token`` adapts the text to the target's tokenizer.
    """

    def __init__(self, profile: Profile, seed: int, words_per_token: float) -> None:
        self._profile, self._seed, self._words_per_token = profile, seed, words_per_token
        self._begun = 0
        self._idle: deque[tuple[Turn, list[dict[str, Any]]]] = deque(maxlen=_IDLE_SESSIONS_MAX)
        system = self._text(random.Random(f"{seed} system"), profile.system_tokens)
        self._system = [{"role": "system", "content": system}] if system else []

    def next_turn(self) -> Turn:
        if self._idle:
            before, messages = self._idle.popleft()
            return self._turn(before.session, before.number + 1, messages)
        self._begun += 1
        return self._turn(self._begun - 1, 0, self._system)

    def finish(self, turn: Turn, answer: str | None) -> None:
        if answer is not None and turn.number + 1 < self._profile.turns:
            told = {"role": "assistant", "content": answer[:_ANSWER_CHARS_MAX]}
            self._idle.append((turn, [*turn.messages, told]))

    def _turn(self, session: int, number: int, history: list[dict[str, Any]]) -> Turn:
        rng = random.Random(f"{self._seed} {session} {number}")
        profile = self._profile
        question = f"{session}.{number}: {self._text(rng, profile.prompt.draw(rng))}"
        return Turn(session, number, [*history, {"role": "user", "content": question}], profile.answer.draw(rng))

    def _text(self, rng: random.Random, tokens: int) -> str:
        return _text(rng, tokens, self._words_per_token)


class Replay:
    """Requests of a recorded trace, in its order. Equal block ids become equal text, so that prefixes are shared."""

    def __init__(self, requests: Sequence[Request], seed: int, words_per_token: float) -> None:
        self._requests, self._seed, self._words_per_token = requests, seed, words_per_token
        self._next = 0
        self._turns: Counter[str] = Counter()

    def next_turn(self) -> Turn:
        """Return the next request. Raises IndexError after the last one."""
        request = self._requests[self._next]
        self._next += 1
        ids = request.ids or [
            f"own {request.number} {k}" for k in range(-(-request.prompt_tokens // TRACE_BLOCK_TOKENS))
        ]
        parts, left = [], request.prompt_tokens
        for value in ids:
            rng = random.Random(f"{self._seed} block {value}")
            parts.append(_text(rng, min(left, TRACE_BLOCK_TOKENS), self._words_per_token))
            left -= TRACE_BLOCK_TOKENS
        message = {"role": "user", "content": " ".join(parts) or "?"}
        self._turns[request.session] += 1
        return Turn(int(request.session), self._turns[request.session] - 1, [message], request.output_tokens)

    def finish(self, turn: Turn, answer: str | None) -> None:
        pass


class _Line(msgspec.Struct):
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class Listed:
    """The prompts of a file, again from its beginning after the last one."""

    def __init__(self, path: Path) -> None:
        """Read JSON lines with ``prompt`` or ``messages``, and ``max_tokens``. Raises OSError, ValueError."""
        self._lines: list[tuple[list[dict[str, Any]], int]] = []
        self._next = 0
        for number, text in enumerate(path.read_bytes().removeprefix(BOM_UTF8).splitlines(), 1):
            if not text.strip():
                continue
            try:
                line = msgspec.json.decode(text, type=_Line)
            except msgspec.MsgspecError as wrong:
                raise ValueError(f"{path}: line {number}: {wrong}") from wrong
            if not line.messages and line.prompt is None:
                raise ValueError(f"{path}: line {number}: it has neither prompt nor messages")
            self._lines.append((line.messages or [{"role": "user", "content": line.prompt}], line.max_tokens))
        if not self._lines:
            raise ValueError(f"{path}: it has no prompt")

    def next_turn(self) -> Turn:
        messages, tokens = self._lines[self._next % len(self._lines)]
        self._next += 1
        return Turn(self._next - 1, 0, messages, tokens)

    def finish(self, turn: Turn, answer: str | None) -> None:
        pass


def _text(rng: random.Random, tokens: int, words_per_token: float) -> str:
    """Return text of about this number of tokens."""
    return " ".join(rng.choices(_WORDS, k=round(tokens * words_per_token)))


def sample_text(words: int) -> str:
    """Return a text of exactly this number of words, to learn how many tokens the target makes of it."""
    return " ".join(random.Random(f"sample {words}").choices(_WORDS, k=words))
