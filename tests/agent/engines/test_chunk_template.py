"""The template of a chunk: what is read by it equals what is decoded, for chunks of every form."""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.engines.upstream import chunks as reader_module
from inference.engines.upstream.chunk_template import ChunkTemplate
from inference.engines.upstream.chunks import ChunkReader
from stream_fabric.ports import FrameSink
from stream_fabric.stream.frames import ErrorInfo, Frame, TerminalStatus, Usage
from stream_fabric.stream.ids import StreamId

STREAM = StreamId("resp_" + "0" * 32)
TEXTS = st.one_of(
    st.sampled_from([" the", "a", "é", "漢字", "\n", '"', "\\", "\u2028", "\x7f", "", "content", '"content":"', "0"]),
    st.text(max_size=6),
)


class Calls(FrameSink):
    """Records each call as it was made."""

    def __init__(self) -> None:
        self.made: list[tuple[object, ...]] = []

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        self.made.append(("text", block, text, tokens))

    def frame(self, frame: Frame) -> None:
        self.made.append(("frame", frame))

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        self.made.append(("usage", prompt, cached, written, reasoning))

    def computed(self, queue_s: float, prefill_s: float) -> None:
        self.made.append(("computed", queue_s, prefill_s))

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        self.made.append(("end", status, error, usage))


def calls_of(chunks: list[bytes], choices: int, counts: bool, *, decodes_all: bool = False) -> object:
    sink = Calls()
    reader = ChunkReader(STREAM, sink, choices, counts=counts)
    for chunk in chunks:
        if decodes_all:
            reader._template = None
        try:
            reader.receive(chunk)
        except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
            sink.made.append(("raised", type(wrong)))
            break
    return sink.made, reader.end(), reader.usage, reader.done


def spell(chunk: dict[str, Any], style: str) -> bytes:
    match style:
        case "escaped":
            return json.dumps(chunk).encode()
        case "spaced":
            return json.dumps(chunk, ensure_ascii=False).encode("utf-8", "surrogatepass")
        case _:
            text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
            return text.encode("utf-8", "surrogatepass")


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[bytes], int, bool]:
    """A server's answer: (chunks, choices, whether counts were asked for)."""
    kind = draw(st.sampled_from(["content", "text", "reasoning", "both"]))
    style = draw(st.sampled_from(["compact", "compact", "spaced", "escaped"]))
    choices, counts, logprobs = draw(st.sampled_from([1, 1, 1, 2])), draw(st.booleans()), draw(st.booleans())
    order = draw(st.permutations(["prompt_tokens", "total_tokens", "completion_tokens"]))
    made, chunks = [0] * choices, []
    for number in range(draw(st.integers(1, 12))):
        index = draw(st.integers(0, choices - 1))
        text = draw(TEXTS)
        key = draw(st.sampled_from(["content", "reasoning"])) if kind == "both" else kind
        choice: dict[str, Any] = {"index": index}
        if key == "text":
            choice["text"] = text
        else:
            choice["delta"] = {"role": "assistant", key: text} if draw(st.integers(0, 9)) == 0 else {key: text}
        if logprobs and draw(st.booleans()):
            choice["logprobs"] = draw(st.sampled_from([None, {"content": [{"token": text, "logprob": -1}]}]))
        choice["finish_reason"] = draw(st.sampled_from([None] * 15 + ["stop"]))
        chunk: dict[str, Any] = {"id": "c", "created": 7 + draw(st.integers(0, 9)) // 9, "choices": [choice]}
        if counts or draw(st.integers(0, 9)) == 0:
            made[index] += draw(st.sampled_from([1, 1, 1, 1, 0, 5, -2]))
            counted = {"prompt_tokens": 4, "total_tokens": 4 + made[index], "completion_tokens": made[index]}
            chunk["usage"] = {name: counted[name] for name in order if name != "total_tokens" or number % 5}
        if draw(st.integers(0, 30)) == 0:
            chunk["error"] = draw(st.sampled_from([None, {"message": "no"}]))
        chunks.append(spell(chunk, style))
        if draw(st.integers(0, 20)) == 0:  # a byte that does not belong there
            at = draw(st.integers(0, len(chunks[-1]) - 1))
            chunks[-1] = chunks[-1][:at] + draw(st.binary(min_size=1, max_size=1)) + chunks[-1][at + 1 :]
    return chunks, choices, counts


@settings(max_examples=600, deadline=None)
@given(answers())
def test_what_is_read_by_a_template_is_what_is_decoded(answer: tuple[list[bytes], int, bool]) -> None:
    assert calls_of(*answer) == calls_of(*answer, decodes_all=True)


def test_logprobs_of_a_token_without_text_go_with_the_next_text() -> None:
    plain = chunk(" the")
    silent = msgspec.json.decode(chunk(""))
    silent["choices"][0]["logprobs"] = {"content": [{"token": "", "logprob": -1}]}
    answer = [plain, plain, msgspec.json.encode(silent), plain]
    calls = cast(Any, calls_of(answer, 1, False))[0]
    assert calls[-1][0] == "frame" and calls[-1][1].logprobs
    assert calls == cast(Any, calls_of(answer, 1, False, decodes_all=True))[0]


def chunk(text: str, made: int = 0, **more: Any) -> bytes:
    usage = {"prompt_tokens": 4, "total_tokens": 4 + made, "completion_tokens": made}
    own = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    return msgspec.json.encode({"id": "c", **own, **({"usage": usage} if made else {}), **more})


@pytest.mark.parametrize("counts", [True, False])
def test_an_ordinary_answer_is_read_by_its_template(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks but the first and those with a backslash: otherwise the test above would compare nothing."""
    texts = [f" word{number}" if number % 10 else "\n" for number in range(1, 100)]
    chunks = [chunk(text, number + 1 if counts else 0) for number, text in enumerate(texts)]
    decoded: list[bytes] = []
    decode = reader_module._decoder.decode

    class Counting:
        def decode(self, data: bytes) -> object:
            decoded.append(data)
            return decode(data)

    monkeypatch.setattr(reader_module, "_decoder", Counting())
    calls = cast(Any, calls_of(chunks, 1, counts))
    assert [text for name, _, text, _ in (call for call in calls[0] if call[0] == "text")] == texts
    assert len(decoded) == 10, "of 99 chunks: the first, and nine with a backslash"


@pytest.mark.parametrize(
    "other",
    [
        chunk("b", 2, choices=[]),
        chunk("b", 2)[:-1],
        chunk("b", 2).replace(b'"total_tokens":6', b'"total_tokens":06'),
        chunk("b", 2).replace(b'"total_tokens":6', b'"total_tokens":-6'),
        chunk("b", 2).replace(b'"completion_tokens":2', b'"completion_tokens":2.0'),
        chunk("b", 2).replace(b'"completion_tokens":2', b'"completion_tokens":2222222222222222222222'),
        chunk('"', 2),
        chunk("b", 2).replace(b'"b"', b'"b\n"'),
        chunk("b", 2).replace(b'"b"', b'"\xff"'),
        chunk("b", 2).replace(b'"b"', b'"b","content":"c"'),
        chunk("", 2),
        b"",
        b"[DONE]",
    ],
)
def test_a_chunk_of_another_form_is_not_read_by_the_template(other: bytes) -> None:
    template = ChunkTemplate.of(chunk("a", 1), "a", 1)
    assert template is not None and template.read(chunk("b", 2)) == ("b", 2)
    assert template.read(other) is None


@pytest.mark.parametrize(
    ("data", "text", "made"),
    [
        (chunk("a", 1), "b", 1),
        (chunk("a", 1), "a", 2),
        (chunk('"', 1), '"', 1),
        (chunk("a", content="b"), "a", None),
        (chunk("a"), "a", 1),
        (b"{}", "a", None),
    ],
)
def test_a_chunk_that_says_more_has_no_template(data: bytes, text: str, made: int | None) -> None:
    assert ChunkTemplate.of(data, text, made) is None
