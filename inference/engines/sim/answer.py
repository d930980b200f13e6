"""One choice of an answer: which tokens it has and as which frames they leave."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from inference.agent.engines.sim.settings import SimSettings
from inference.agent.engines.sim.text import Prompt, StopText, json_like, logprobs, pieces, skip, words
from stream_fabric.frames import ChoiceEnd, Close, Delta, Frame, Open
from stream_fabric.ids import StreamId, derived_id

_TOP_LOGPROBS_MAX = 20

Piece = Frame | str | None
"""A frame, a token's text in the block that was opened last, or None: the token has been made."""


class Answer:
    """Of one choice: ``length`` tokens; ``token()`` gives what leaves with the next of them."""

    def __init__(self, stream: StreamId, prompt: Prompt, choice: int, choices: int, settings: SimSettings) -> None:
        body = prompt.body
        self.choice = choice
        self.prompt_tokens = prompt.tokens
        self._stream = stream
        self._prompt = prompt
        self._seed = _seed(body, settings)
        # Numbers do not depend on the order in which choices happen to get their tokens
        self._block = choice - choices
        self._choices = choices
        self._top = _top_logprobs(body)
        self._finish = "stop"
        self._detail: msgspec.Raw | None = None
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        spread = settings.length_max - settings.length_min + 1
        natural = settings.length_min + prompt.number("length", self._seed + choice) % spread
        self.length = asked or max(natural, int(body.get("min_tokens") or 0))
        self._natural = asked is None
        self._pieces = self._plan(body, asked)
        self.tokens_made = 0
        self._told = 0
        self.ended = False

    def _plan(self, body: dict[str, Any], asked: int | None) -> Iterator[Piece]:
        tool = _tool(body, self._prompt)
        format_ = body.get("response_format") or {}
        if tool is not None:
            arguments = json_like(tool.get("parameters"), self._prompt, self._seed)
            tokens = pieces(arguments)
            self._finish, self.length = "tool_calls", len(tokens)
            call = derived_id("call_", self._stream, self.choice + 1)
            return self._spell([("tool", iter(tokens), call, tool["name"])])
        if format_.get("type") in ("json_object", "json_schema"):
            schema = (format_.get("json_schema") or {}).get("schema")
            tokens = pieces(json_like(schema, self._prompt, self._seed))
            self.length = len(tokens)
            return self._spell([("text", iter(tokens), None, None)])
        stops = body.get("stop") or []
        endless = words(self._prompt, self._seed, self.choice)
        if self._prompt.continued:
            said, endless = skip(endless, self._prompt.continued)
            if self._natural:
                if said >= self.length:  # all has been said but that it is the end
                    endless = iter([""])
                self.length = max(1, self.length - said)
        if asked:
            self._finish = "length"
        if stops:
            endless = self._until_stop(endless, [stops] if isinstance(stops, str) else stops)
        if body.get("reasoning_effort") or (body.get("chat_template_kwargs") or {}).get("enable_thinking"):
            thoughts = self.length // 3
            return self._spell([("reasoning", islice(endless, thoughts), None, None), ("text", endless, None, None)])
        return self._spell([("text", endless, None, None)])

    def _until_stop(self, tokens: Iterator[str], stops: list[str]) -> Iterator[str]:
        """Tokens before the first stop string, each with as much text as can no more belong to one."""
        stop = StopText(stops)
        for number, token in enumerate(islice(tokens, self.length), 1):
            text = stop.take(token, last=number == self.length)
            if stop.found is not None:
                self._finish, self._detail = "stop", msgspec.Raw(msgspec.json.encode(stop.found))
                self.length = self.tokens_made
            yield text
            if stop.found is not None:
                return

    def _spell(self, blocks: list[tuple[Any, Iterator[str], str | None, str | None]]) -> Iterator[Piece]:
        spelled = 0
        for kind, tokens, call, name in blocks:
            self._block += self._choices
            form: Any = {"tool": "function", "reasoning": "raw"}.get(kind)
            yield Open(self._block, self.choice, kind, form, call, name)
            for token in tokens:
                if not token:
                    pass  # made, and held back
                elif self._top >= 0 and kind == "text":
                    yield Delta(self._block, token, self.untold(), logprobs(token, self._top))
                else:
                    yield token
                spelled += 1
                yield None
                if spelled >= self.length:
                    break
            yield Close(self._block)
        yield ChoiceEnd(self.choice, self._finish, self._detail)

    @property
    def block(self) -> int:
        """The block that was opened last."""
        return self._block

    def untold(self) -> int:
        """Tokens since the last text that left: that one's, and those whose text was held back."""
        tokens, self._told = self.tokens_made - self._told, self.tokens_made
        return tokens

    def token(self) -> Iterator[Piece]:
        """What leaves with the next token; with the last one, what closes the choice."""
        self.tokens_made += 1
        for piece in self._pieces:
            if piece is None:
                if self.tokens_made < self.length:
                    return
                continue
            yield piece
        self.ended = True


def _seed(body: dict[str, Any], settings: SimSettings) -> int:
    seed = body.get("seed")
    return (seed if isinstance(seed, int) else settings.seed) % (1 << 62)


def _top_logprobs(body: dict[str, Any]) -> int:
    """How many alternatives a token's logprobs name; -1: no logprobs. Of completions ``logprobs`` is the number."""
    asked = body.get("logprobs")
    if asked is None or asked is False:
        return -1
    top = int(body.get("top_logprobs") or 0) if asked is True else int(asked)
    if not 0 <= top <= _TOP_LOGPROBS_MAX:
        raise ValueError(f"at most {_TOP_LOGPROBS_MAX} logprobs a token, got {top}")
    return top


def _tool(body: dict[str, Any], prompt: Prompt) -> dict[str, Any] | None:
    """The function that the request makes the simulator call: one it demands, or its last message names."""
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
    return next((f for f in functions if f["name"] in last), None)
