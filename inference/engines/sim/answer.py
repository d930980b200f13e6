"""One choice of a simulated answer: its tokens, and the frames that carry them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from inference.engines.sim.settings import SimSettings
from inference.engines.sim.text import Prompt, StopText, begins, json_like, logprobs, skip, split_tokens, words
from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, Frame, Open
from stream_fabric.stream.ids import StreamId, derived_id

_TOP_LOGPROBS_MAX = 20
_CHOICES_MAX = 128
"""Choices of a prompt whose rest may be asked for."""
_BOUND_TOKENS = 8192
"""A ``max_tokens`` from here on only bounds a text, as agents mean it: the text ends at its natural length, unless the
request has ``ignore_eos``. One that exceeds the KV cache is refused."""
_WORD = re.compile(r"[a-z0-9]+")
_VERBS = ("find", "get", "list", "search", "set")
"""Words of a function's name that its users leave out."""

Piece = Frame | str | None
"""A frame, a token's text for the last opened block, or None: a token was made."""


class Answer:
    """One choice of ``length`` tokens; each call of ``token()`` gives the output of the next token.

    ``n``: choices of each prompt. A prompt's choices are the same beside other prompts as alone. As in vLLM, choice
    ``k`` of a prompt is that of a request for one choice with a seed greater by ``k``.
    """

    def __init__(
        self, stream: StreamId, prompt: Prompt, choice: int, choices: int, settings: SimSettings, n: int | None = None
    ) -> None:
        body = prompt.body
        self.choice = choice
        self.prompt_tokens = prompt.tokens
        self._stream = stream
        self._prompt = prompt
        self._seed = _seed(prompt, settings) + choice % (n or choices)
        # Numbers do not depend on the order in which choices happen to get their tokens
        self._block = choice - choices
        self._choices = choices
        self._top = _top_logprobs(body)
        self._finish = "stop"
        self._detail: msgspec.Raw | None = None
        self.length = 0
        self._pieces = self._choose_output(body, settings)
        self.tokens_made = 0
        self.thought = 0
        """Tokens of reasoning."""
        self._told = 0
        self.ended = False

    def _choose_output(self, body: dict[str, Any], settings: SimSettings) -> Iterator[Piece]:
        """Choose what the request asks for (tool call, JSON or text) and return its output."""
        tool = _requested_function(body, self._prompt)
        format_ = body.get("response_format") or {}
        if tool is not None:
            arguments = json_like(tool.get("parameters"), self._prompt, self._seed)
            tokens = split_tokens(arguments)
            self._finish, self.length = "tool_calls", len(tokens)
            call = derived_id("call_", self._stream, self.choice + 1)
            return self._to_pieces([("tool", iter(tokens), call, tool["name"])])
        if format_.get("type") in ("json_object", "json_schema"):
            schema = (format_.get("json_schema") or {}).get("schema")
            tokens = split_tokens(json_like(schema, self._prompt, self._seed))
            self.length = len(tokens)
            return self._to_pieces([("text", iter(tokens), None, None)])
        stops = body.get("stop") or []
        endless = self._text(body, settings)
        if stops:
            endless = self._cut_at_stop(endless, [stops] if isinstance(stops, str) else stops)
        if body.get("reasoning_effort") or (body.get("chat_template_kwargs") or {}).get("enable_thinking"):
            thoughts = self.length // 3
            return self._to_pieces(
                [("reasoning", islice(endless, thoughts), None, None), ("text", endless, None, None)]
            )
        return self._to_pieces([("text", endless, None, None)])

    def _text(self, body: dict[str, Any], settings: SimSettings) -> Iterator[str]:
        """Choose how many tokens a text has and why it ends; return its tokens after those that were said before."""
        prompt = self._prompt
        said, rest = skip(words(prompt, self._seed), prompt.continued)
        spread = settings.length_max - settings.length_min + 1
        natural = settings.length_min + prompt.number("length", self._seed) % spread
        natural = max(natural, int(body.get("min_tokens") or 0))
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        if asked == 0:  # vLLM too makes one token where only the prompt is asked for
            asked = 1
        bounds = range(max(_BOUND_TOKENS, natural) - said, settings.num_blocks * settings.block_size)
        if asked is None or (asked in bounds and not body.get("ignore_eos")):
            self.length = max(1, natural - said)
            if said >= natural:  # only the end is missing
                rest = iter([""])
        else:
            self.length, self._finish = asked, "length"
        if settings.context and self.length > settings.context - prompt.tokens:
            self.length, self._finish = settings.context - prompt.tokens, "length"
        return rest

    def _cut_at_stop(self, tokens: Iterator[str], stops: list[str]) -> Iterator[str]:
        """Yield the tokens before the first stop string; hold back text that may belong to a stop string."""
        stop = StopText(stops)
        for number, token in enumerate(islice(tokens, self.length), 1):
            text = stop.take(token, last=number == self.length)
            if stop.found is not None:
                self._finish, self._detail = "stop", msgspec.Raw(msgspec.json.encode(stop.found))
                self.length = self.tokens_made
            yield text
            if stop.found is not None:
                return

    def _to_pieces(self, blocks: list[tuple[Any, Iterator[str], str | None, str | None]]) -> Iterator[Piece]:
        """Yield the output of blocks, given as (kind, tokens, call id, function name); a None follows each token."""
        spelled = 0
        for kind, tokens, call, name in blocks:
            self._block += self._choices
            form: Any = {"tool": "function", "reasoning": "raw"}.get(kind)
            yield Open(self._block, self.choice, kind, form, call, name)
            for token in tokens:
                if not token:
                    pass  # the token is made, its text held back
                elif self._top >= 0 and kind == "text":
                    yield Delta(self._block, token, self.tokens_since_text(), logprobs(token, self._top))
                else:
                    yield token
                spelled += 1
                self.thought += kind == "reasoning"
                yield None
                if spelled >= self.length:
                    break
            yield Close(self._block)
        yield ChoiceEnd(self.choice, self._finish, self._detail)

    def hashes(self, block_size: int) -> list[int]:
        """Hashes of the blocks of its prompt."""
        return self._prompt.hashes(block_size)

    @property
    def block(self) -> int:
        """Number of the last opened block."""
        return self._block

    def tokens_since_text(self) -> int:
        """Return the number of tokens since the last call; tokens whose text was held back count too."""
        tokens, self._told = self.tokens_made - self._told, self.tokens_made
        return tokens

    def token(self) -> Iterator[Piece]:
        """Return the output of the next token; the last token also closes the choice."""
        self.tokens_made += 1
        for piece in self._pieces:
            if piece is None:
                if self.tokens_made < self.length:
                    return
                continue
            yield piece
        self.ended = True


def _seed(prompt: Prompt, settings: SimSettings) -> int:
    """Return the seed of a request's first choice. What continues a choice without a seed may continue any of them."""
    seed = prompt.body.get("seed")
    if isinstance(seed, int):
        return seed % (1 << 62)
    first = settings.seed % (1 << 62)
    return next((first + k for k in range(_CHOICES_MAX) if begins(words(prompt, first + k), prompt.continued)), first)


def _top_logprobs(body: dict[str, Any]) -> int:
    """Return the number of alternatives in a token's logprobs; -1: no logprobs."""
    asked = body.get("logprobs")
    if asked is None or asked is False:
        return -1
    top = int(body.get("top_logprobs") or 0) if asked is True else int(asked)
    if not 0 <= top <= _TOP_LOGPROBS_MAX:
        raise ValueError(f"at most {_TOP_LOGPROBS_MAX} logprobs a token, got {top}")
    return top


def _requested_function(body: dict[str, Any], prompt: Prompt) -> dict[str, Any] | None:
    """Return the function to call: the one that the request demands, or that the user's last message speaks of and
    whose result has not come yet."""
    functions = [t["function"] for t in body.get("tools") or () if t.get("type") == "function"]
    choice = body.get("tool_choice")
    if not functions or choice == "none":
        return None
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        return next((f for f in functions if f["name"] == name), None)
    if choice == "required":
        return dict(functions[0])
    last = prompt.data.rpartition(b"<user>")[2].decode("utf-8", "replace")
    return None if "<tool>" in last else next((f for f in functions if _is_named(f["name"], last)), None)


def _is_named(function: str, text: str) -> bool:
    """Whether a text speaks of a function: it has the name, or each word of the name after its verb."""
    words = [word for word in _WORD.findall(function.lower()) if word not in _VERBS]
    return function in text or (bool(words) and set(words) <= set(_WORD.findall(text.lower())))
