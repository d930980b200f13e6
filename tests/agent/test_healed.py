"""Texts that may end within a token: the last word is asked for again, and comes once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.agent.continuation import (
    ContinuingSink,
    Part,
    PriorChoice,
    PriorOutput,
    continuing_requests,
    prior_output,
)
from inference.agent.continued.healed import HealedSink
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, Note, Open, Usage, encode
from tests.agent.engines.recorder import Recorder, chat, completion
from tests.agent.rest import submit_rest
from tests.support.virtual import run_virtual

STOP: dict[str, Any] = {"stop": ["\nObservation:"]}


def said(text: str) -> PriorOutput:
    return PriorOutput((PriorChoice(text, 9, 0),), 7, "", 1)


@pytest.mark.parametrize(
    ("text", "begun", "tail"),
    [
        ("any by a", "any by", " a"),
        ("any by ", "any by", " "),
        ("any:\n\n  b", "any:", "\n\n  b"),
        ("any", "any", ""),
        (" any", " any", ""),
        ("any " + "x" * 64, "any " + "x" * 64, ""),
        ("河は海へ", "河は海へ", ""),
    ],
)
def test_the_last_word_is_asked_for_again(text: str, begun: str, tail: str) -> None:
    """Where stop strings are looked for. A text of one word, or without words, is asked for whole."""
    (part,) = continuing_requests(chat(1, max_tokens=20, **STOP), said(text))
    body = msgspec.json.decode(part.request.body)
    assert (body["messages"][-1]["content"], part.tail) == (begun, tail)
    assert (body["max_tokens"], part.request.own_chars) == (11, len(begun))
    assert (part.whole is None) == (not tail)
    if part.whole is not None:
        assert msgspec.json.decode(part.whole.body)["messages"][-1]["content"] == text
        assert part.whole.own_chars == len(text)


@pytest.mark.parametrize("more", [{}, {"stop": []}, STOP | {"logprobs": 0}], ids=["no stop", "none", "logprobs"])
def test_another_text_is_asked_for_whole(more: dict[str, Any]) -> None:
    (part,) = continuing_requests(completion(1, "A", **more), said(" any by a"))
    assert (msgspec.json.decode(part.request.body)["prompt"], part.tail, part.whole) == ("A any by a", "", None)


def test_the_last_word_has_its_own_tokens_again() -> None:
    """The rest is as long as without a death. A delta that only ends in the word has none again."""
    lines = [encode(Open(0, 0, "text")), *(encode(Delta(0, text, 2)) for text in (" any", " b", "y a", "b", "c"))]
    (part,) = continuing_requests(chat(1, max_tokens=20, **STOP), prior_output(lines, 1))
    assert (part.tail, part.tail_tokens) == (" abc", 4)
    body = msgspec.json.decode(part.request.body)
    assert (body["messages"][-1]["content"], body["max_tokens"]) == (" any by", 14)
    assert part.whole is not None and msgspec.json.decode(part.whole.body)["max_tokens"] == 10


@given(
    pieces=st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=8),
    cut=st.integers(0, 12),
    tail_tokens=st.integers(0, 3),
)
def test_nothing_comes_twice_however_the_output_is_cut(pieces: list[str], cut: int, tail_tokens: int) -> None:
    run_virtual(_must_come_once(pieces, cut, tail_tokens))


async def _must_come_once(pieces: list[str], cut: int, tail_tokens: int) -> None:
    text = "".join(pieces)
    tail = text[: min(cut, len(text))]
    sink, differs = Recorder(), []
    healed = HealedSink(sink, tail, tail_tokens, lambda: differs.append(1))
    healed.frame(Note("prompt", prompt_tokens=3))
    healed.frame(Open(0, 0, "text"))
    for piece in pieces:
        healed.text(0, piece)
    for frame in (Close(0), ChoiceEnd(0, "length")):
        healed.frame(frame)
    healed.end("completed", usage=Usage(3, output=len(pieces)))
    assert not differs
    assert sink.body("text") == text[len(tail) :]
    assert sink.end_usage is not None and sink.end_usage.output == sink.tokens()


@pytest.mark.parametrize(
    "output", [[Delta(0, "by")], [Delta(0, " "), Close(0)], [Open(1, 0, "tool", "function", "c", "f")]]
)
async def test_another_output_is_told_once_and_not_passed_on(output: list[Any]) -> None:
    sink, differs = Recorder(), []
    healed = HealedSink(sink, " a", 1, lambda: differs.append(1))
    for frame in (Open(0, 0, "text"), *output, Delta(0, "more"), ChoiceEnd(0, "stop")):
        healed.frame(frame)
    healed.end("completed", usage=Usage(3))
    assert (differs, sink.frames, sink.status) == ([1], [], None)


@pytest.mark.parametrize("same", [True, False])
def test_the_rest_follows_the_text_of_the_log(same: bool) -> None:
    """Also where the next engine would have said another word."""
    request = chat(1, seed=3, max_tokens=40, **STOP)

    async def answer(part: Part, before: PriorOutput | None, log: Recorder) -> None:
        engine = SimEngine(SimSettings.parse("itl_ms=1,ttft_ms=0"))
        await engine.start()
        submit_rest(engine, part, log if before is None else ContinuingSink(log, before))
        await log.ended.wait()
        await engine.close()

    async def run() -> None:
        alone, log = Recorder(), Recorder()
        await answer(Part(0, request), None, alone)
        whole = alone.body("text")
        cut = whole.index(" ", 40) + 3
        begun = whole[:cut]
        log.frame(Open(0, 0, "text"))
        log.text(0, begun, 8)
        before = said(begun)
        (part,) = continuing_requests(request, before)
        assert part.tail
        if not same:  # the simulator says the same again
            part = part._replace(tail=" zz")
        await answer(part, before, log)
        text = log.body("text")
        assert text == whole[: len(text)] and len(text) > cut + 20
        assert log.status == "completed"

    run_virtual(run())
