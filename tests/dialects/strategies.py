"""Well-formed streams: blocks of several choices in any order, with all that frames can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

from stream_fabric.stream.frames import (
    BlockKind,
    ChoiceEnd,
    Close,
    Delta,
    End,
    ErrorInfo,
    Frame,
    Note,
    Open,
    TerminalStatus,
    Usage,
    encode,
)
from stream_fabric.stream.ids import StreamId
from stream_gw.dialects.facts import StreamFacts

STREAM = StreamId("resp_0193b2c4d5e670008a1b2c3d4e5f6071")

_AWKWARD = [
    '"',
    "\\",
    "\n",
    "\r\n",
    "\u2028",
    "\x00",
    "\x1f",
    "\U0001f680",
    "é",
    "",
    '"logprobs":null',
    "data: ",
    "0:2",
]
texts = st.one_of(st.sampled_from(_AWKWARD), st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
counts = st.integers(0, 1000)
_KINDS: st.SearchStrategy[Literal["chat", "completions"]] = st.sampled_from(["chat", "completions"])
_STATUSES: st.SearchStrategy[TerminalStatus] = st.sampled_from(["completed", "cancelled", "failed", "incomplete"])


@dataclass(frozen=True)
class Stream:
    facts: StreamFacts
    frames: list[Frame]

    @property
    def lines(self) -> list[bytes]:
        return [encode(frame) for frame in self.frames]

    def structure(self, seq: int) -> list[bytes]:
        """Structural frames up to ``seq``, which a log keeps for readers that start later."""
        return [
            encode(frame)
            for frame in self.frames[:seq]
            if isinstance(frame, Open | ChoiceEnd) or (isinstance(frame, Note) and frame.kind in ("prompt", "input"))
        ]


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


@st.composite
def _logprob(draw: st.DrawFn, token: str) -> dict[str, Any]:
    number = st.floats(-30, 0, allow_subnormal=False)
    tops = [{"token": t, "logprob": draw(number), "bytes": None} for t in draw(st.lists(texts, max_size=2))]
    return {"token": token, "logprob": draw(number), "bytes": list(token.encode()), "top_logprobs": tops}


@st.composite
def _legacy_logprobs(draw: st.DrawFn, tokens: list[str]) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "token_logprobs": [draw(st.none() | st.floats(-30, 0)) for _ in tokens],
        "top_logprobs": draw(st.none() | st.just([{"a": -1.5}] * len(tokens))),
        "text_offset": [draw(counts) for _ in tokens],
    }


@st.composite
def _deltas(draw: st.DrawFn, kind: BlockKind, chat: bool, logprobs: bool) -> list[Frame]:
    """A block's deltas, numbered 0 until the block has its number."""
    deltas: list[Frame] = []
    for text in draw(st.lists(texts, max_size=4)):
        if logprobs and kind in ("text", "refusal"):
            cut = draw(st.integers(0, len(text)))
            tokens = [part for part in (text[:cut], text[cut:]) if part]
            if chat or draw(st.booleans()):
                given = raw([draw(_logprob(token)) for token in tokens])
            else:
                given = raw(draw(_legacy_logprobs(tokens)))
            deltas.append(Delta(0, text, len(tokens), given))
        else:
            deltas.append(Delta(0, text, draw(st.integers(0, 3))))
    return deltas


@st.composite
def _arguments(draw: st.DrawFn) -> list[Frame]:
    """Deltas that spell a JSON object."""
    value = draw(st.dictionaries(texts, st.integers(-9, 9) | texts | st.booleans(), max_size=3))
    text = msgspec.json.encode(value).decode()
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [Delta(0, text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def _block(
    draw: st.DrawFn, choice: int, kinds: list[BlockKind], chat: bool, logprobs: bool, spelled: bool
) -> list[Frame]:
    kind = draw(st.sampled_from(kinds))
    form: Any = None
    name: str | None = None
    item: msgspec.Raw | None = None
    if kind == "tool":
        form = draw(st.sampled_from([None, "function", "function", "server"]))
        name = draw(st.none() | st.sampled_from(["get_weather", "search"]))
    elif kind == "reasoning":
        form = draw(st.sampled_from(["raw", "summary", "redacted"]))
    elif kind == "item":
        item = raw({"type": "web_search_call"})
    id_ = draw(st.none() | st.just("call_1")) if kind == "tool" else None
    if spelled and kind == "tool":
        body = draw(_arguments())
    else:
        body = [] if kind == "item" else draw(_deltas(kind, chat, logprobs))
    opaque = draw(st.none() | st.just("c2lnbmF0dXJl")) if kind == "reasoning" else None
    return [Open(0, choice, kind, form, id_, name, item), *body, Close(0, opaque)]


def _numbered(frame: Frame, block: int) -> Frame:
    assert isinstance(frame, Open | Delta | Close)
    return msgspec.structs.replace(frame, block=block)


@st.composite
def streams(
    draw: st.DrawFn,
    kind: Literal["chat", "completions"] | None = None,
    status: TerminalStatus | None = None,
    *,
    single: bool = False,
) -> Stream:
    """A stream from its first frame to its terminal. ``single``: one choice, no logprobs, arguments that are JSON."""
    spelled = draw(_KINDS if kind is None else st.just(kind))
    chat = spelled == "chat"
    kinds: list[BlockKind] = ["text", "text", "reasoning", "refusal", "tool", "item"] if chat else ["text"]
    logprobs = not single and draw(st.booleans())
    n = 1 if single else draw(st.integers(1, 3))
    choices = [choice for choice in range(n) for _ in range(draw(st.integers(0, 3)))]
    lanes = [(choice, draw(_block(choice, kinds, chat, logprobs, single))) for choice in choices]
    order = draw(st.permutations([index for index, (_, lane) in enumerate(lanes) for _ in lane]))
    left = [sum(len(lane) for at, lane in lanes if at == choice) for choice in range(n)]
    frames: list[Frame] = [Note("started")] if draw(st.booleans()) else []
    if draw(st.booleans()) or not all(left):  # who says nothing at all has at least read the prompt
        frames.append(Note("prompt", draw(counts), 0))
    ends = [
        ChoiceEnd(choice, draw(st.sampled_from(["stop", "length", "tool_calls"])), draw(st.none() | st.just(raw("\n"))))
        for choice in range(n)
    ]
    frames += [end for end, after in zip(ends, left, strict=True) if not after]
    numbers: dict[int, int] = {}
    iterators = [iter(lane) for _, lane in lanes]
    for index in order:
        choice = lanes[index][0]
        frames.append(_numbered(next(iterators[index]), numbers.setdefault(index, len(numbers))))
        left[choice] -= 1
        if not left[choice]:
            frames.append(ends[choice])
    # An input of a stream of one choice comes before the end of its answer
    place = next(index for index, frame in enumerate(frames) if isinstance(frame, ChoiceEnd)) if n == 1 else len(frames)
    frames.insert(draw(st.integers(0, place)), Note("input" if n == 1 else "started", body=raw({"a": 1})))
    ended = draw(_STATUSES if status is None else st.just(status))
    if ended != "completed":
        frames = frames[: draw(st.integers(0, len(frames)))]
    error = ErrorInfo("engine_error", "the engine broke", retriable=True) if ended == "failed" else None
    frames.append(End(ended, draw(st.builds(Usage, counts, counts, counts, counts, counts)), error))
    facts = StreamFacts(
        STREAM,
        1763712000,
        draw(st.sampled_from(["sim-small", 'a"b/ü'])),
        spelled,
        n,
        draw(st.booleans()),
        logprobs=logprobs,
    )
    return Stream(facts, frames)
