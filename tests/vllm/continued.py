"""Streams that lose their producer: what they are asked, and what the whole of them must be."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from stream_fabric.stream.frames import Delta
from tests.chaos.fleet import LogReader
from tests.gateway.wire import DONE, HEARTBEAT, Exchange
from tests.vllm.real import MODEL, Answer, Direct, chat, endless, folded, tokens_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USAGE = {"include_usage": True}
ASKED = 1200
"""Tokens: some seconds' worth."""
PROMPTS = ["Some words:", "More words:", "The last words of three prompts:"]
WORDS = ("the", "of", "and", "or", "to", "in", "any", "that", "for", "by", "with", "License")
"""Frequent in the text that trained the tokenizer, so each is one token with the space before it."""


@dataclass(frozen=True)
class Question:
    path: str
    body: dict[str, Any]
    cut_alike: bool
    """Whether its answer's text is always cut into the tokens that it was made of."""
    choices: int = 1

    def streamed(self) -> dict[str, Any]:
        return {**self.body, "stream": True, "stream_options": USAGE}


async def questions(direct: Direct, model: str = MODEL) -> dict[str, Question]:
    """Such as can be continued.

    vLLM goes on from a text, which it cuts into tokens anew. ``words`` and ``completion`` say words of one token each,
    which are cut the same again; so do the three choices of ``prompts``, and ``begun``, whose answer the client has
    begun. ``free`` is noise, which is not.
    """
    pushed = {"ignore_eos": True, "logit_bias": await one_token_words(direct), "seed": 1, "model": model}
    completion = {"prompt": "Some words:", "temperature": 0, "max_tokens": ASKED, **pushed}
    words = chat("Say words", max_tokens=ASKED, **pushed)
    answer = {"role": "assistant", "content": "These are words:"}
    begun = {"messages": [*words["messages"], answer], "continue_final_message": True, "add_generation_prompt": False}
    return {
        "words": Question(CHAT, words, True),
        "begun": Question(CHAT, words | begun, True),
        "completion": Question(COMPLETIONS, completion, True),
        "prompts": Question(COMPLETIONS, completion | {"prompt": PROMPTS}, True, 3),
        "free": Question(CHAT, {**endless(tokens=ASKED), "seed": 1, "model": model}, False),
    }


def several_tokens(asked: dict[str, Question]) -> dict[str, Question]:
    """Such with more for each token than its text: two choices of a prompt, and logprobs in both shapes.

    The two choices are sampled, because vLLM gives no second greedy one; what they say is certain all the same.
    """
    words, completion = asked["words"].body, asked["completion"].body
    certain = {token: 100 - 10 * rank for rank, token in enumerate(words["logit_bias"])}
    return {
        "two": Question(CHAT, words | {"n": 2, "temperature": 0.01, "logit_bias": certain}, True, 2),
        "logprobs": Question(CHAT, words | {"logprobs": True, "top_logprobs": 2}, True),
        "offsets": Question(COMPLETIONS, completion | {"logprobs": 1}, True),
    }


def repeated(asked: dict[str, Question]) -> dict[str, Question]:
    """Completions that no server continues, and one whose prompt is truncated, which keeps its beginning."""
    completion = asked["completion"].body
    return {
        "truncated": Question(COMPLETIONS, completion | {"truncate_prompt_tokens": 2}, True),
        "ids": Question(COMPLETIONS, completion | {"prompt": [5, 300, 301]}, True),
        "echo": Question(COMPLETIONS, completion | {"echo": True}, True),
        "guided text": Question(
            COMPLETIONS, {**completion, "logit_bias": None, "structured_outputs": {"regex": "[a-z ]+"}}, True
        ),
    }


async def one_token_words(direct: Direct) -> dict[str, int]:
    """A push towards words that are one token each, however they follow each other."""
    return {str(token): 100 for word in WORDS for (token,) in [await tokens(direct, f" {word}")]}


async def tokens(direct: Direct, text: str) -> list[int]:
    body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
    status, answer = await direct.post("/tokenize", body)
    assert status == 200, answer
    found: list[int] = json.loads(answer)["tokens"]
    return found


@dataclass
class Told:
    """A client's result."""

    stream: str
    body: bytes
    at: float = 0.0
    """When it was whole, on the monotonic clock."""
    gap: float = 0.0
    """The longest silence after its beginning."""

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return chunks_of(self.body)

    def text(self, epoch: int | None = None) -> str:
        answers, _ = folded([chunk for chunk in chunks_of(self.body, epoch) if "choices" in chunk])  # not an error
        return "".join(answer.reasoning + answer.text for _, answer in sorted(answers.items()))

    @property
    def error_code(self) -> str | None:
        return next((chunk["error"]["code"] for chunk in self.chunks if "error" in chunk), None)

    @property
    def epochs(self) -> list[int]:
        return sorted({epoch for epoch, _ in events_of(self.body) if epoch})


async def begun(exchange: Exchange) -> Told:
    """A stream of which some has come."""
    assert exchange.status == 200, exchange.status
    return Told(exchange.headers["x-stream-id"], await until(exchange, b"\ndata: {", 40))


async def ended(told: Told, exchange: Exchange) -> None:
    told.at = time.monotonic()
    while piece := await exchange.piece(100):
        now = time.monotonic()
        if piece != HEARTBEAT:
            told.gap, told.at = max(told.gap, now - told.at), now
        told.body += piece


async def all_ended(told: Mapping[str, Told], exchanges: Mapping[str, Exchange]) -> None:
    await asyncio.gather(*(ended(told[name], exchanges[name]) for name in told))


async def must_be_continued(question: Question, told: Told, direct: Direct, log: LogReader) -> None:
    """``direct``: a vLLM of the same model.

    The stream is told whole, and its usage is exact. Where the text is cut alike, it is the undisturbed vLLM's to the
    last token. Otherwise all that was said before the death is, and what follows is to the last token what vLLM says
    when it is asked to go on from there.
    """
    await must_be_whole(question, told, direct, log)
    # Between them may be one that never spoke: its replica took the stream back before it knew that its vLLM was dead
    assert len(told.epochs) == 2 and told.epochs[0] == 1, f"a second producer: {told.epochs}"
    first, second = (told.text(epoch) for epoch in told.epochs)
    assert first and second
    if question.cut_alike:
        return
    frames, _ = await log.whole(told.stream)
    made = sum(frame.tokens for epoch, frame in frames if epoch == 1 and isinstance(frame, Delta))
    alone, _ = folded(await direct.chunks(question.path, question.body | {"max_tokens": made}))
    assert alone[0].text == first
    messages = [*question.body["messages"], {"role": "assistant", "content": first}]
    on = {"continue_final_message": True, "add_generation_prompt": False, "messages": messages}
    rest, _ = folded(await direct.chunks(question.path, question.body | on | {"max_tokens": ASKED - made}))
    assert rest[0].text == second


async def must_be_whole(question: Question, told: Told, direct: Direct, log: LogReader) -> None:
    """As it came, and as it was settled."""
    expected, usage = folded(await direct.chunks(question.path, question.body))
    got, told_usage = folded(told.chunks)
    assert [answer.finish for answer in got.values()] == ["length"] * question.choices
    assert tokens_of(told_usage)[0] == tokens_of(usage)[0]
    output = ASKED * question.choices
    assert tokens_of(told_usage)[2] == tokens_of(usage)[2] == output
    if told.epochs == [1]:
        assert got == expected
    elif question.cut_alike:
        assert got.keys() == expected.keys()
        assert all(alike(got[number], answer) for number, answer in expected.items()), (got, expected)
    _, end = await log.whole(told.stream)
    assert (end.status, end.usage and (end.usage.prompt, end.usage.output)) == (
        "completed",
        (tokens_of(usage)[0], output),
    )


def alike(one: Answer, other: Answer) -> bool:
    """Whether two answers are equal. Log probabilities of a prompt that was computed at once differ a little."""
    numbers = [[number for _, number in answer.tokens] for answer in (one, other)]
    named = [replace(answer, tokens=tuple((token, 0.0) for token, _ in answer.tokens)) for answer in (one, other)]
    return named[0] == named[1] and numbers[0] == pytest.approx(numbers[1], abs=0.02)


async def must_be_told(told: Told, code: str, log: LogReader) -> None:
    """It ended with an error that may be tried again, and once."""
    errors = [chunk["error"] for chunk in told.chunks if "error" in chunk]
    assert [(error["code"], error["retriable"]) for error in errors] == [(code, True)]
    assert (await log.terminal(told.stream)).status == "failed"


async def until(exchange: Exchange, what: bytes, times: int) -> bytes:
    """Read on until it has come so often."""
    seen = b""
    while seen.count(what) < times:
        piece = await exchange.piece()
        assert piece, f"the body ended: {seen!r}"
        seen += piece
    return seen


def events_of(body: bytes) -> Sequence[tuple[int, str]]:
    """Each event's data with its producer's epoch, whatever comments the body has; 0: it has no id."""
    found = []
    for event in body.decode().split("\n\n"):
        lines = [line.partition(": ") for line in event.splitlines()]
        fields = {name: value for name, _, value in lines if name}
        if "data" in fields:
            found.append((int(fields.get("id", "0-0").split("-")[0]), fields["data"]))
    return found


def chunks_of(body: bytes, epoch: int | None = None) -> list[dict[str, Any]]:
    """The chunks of a body; those of one producer's epoch, if asked."""
    return [json.loads(data) for said_in, data in events_of(body) if data != DONE and epoch in (None, said_in)]
