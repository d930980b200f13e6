"""Responses that begin with a compaction, which no frame holds: every reader gets it once, in its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given

from stream_fabric.errors import Unsupported
from stream_fabric.stream.frames import Open
from stream_gw.dialects import ENCODERS, encoder_for
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.responses.requests import read_asked
from stream_gw.dialects.responses.whole import encoder_after, frames_before, response_of
from tests.dialects.canned import CannedOpenAI, bare
from tests.dialects.laws import reader
from tests.dialects.responses.fold import events, fold
from tests.dialects.strategies import STREAM, Stream, streams

DIALECT = "openai.responses"


def compacted(stream: Stream) -> Stream:
    return replace(stream, facts=msgspec.structs.replace(stream.facts, compaction="AgAB\u00e9", encoder=4))


def has_own_ids(stream: Stream) -> bool:
    ids = [frame.id for frame in stream.frames if isinstance(frame, Open) and frame.id is not None]
    return len(ids) == len(set(ids))


singles = streams(single=True).map(compacted)
whole_singles = streams("chat", "completed", single=True).filter(has_own_ids).map(compacted)
ITEM: dict[str, Any] = {"id": f"cmp_{STREAM[5:]}", "type": "compaction", "encrypted_content": "AgAB\u00e9"}


@given(singles)
def test_it_is_the_first_item_and_the_others_follow(stream: Stream) -> None:
    final = fold(reader(DIALECT, stream).chunks(stream.lines))
    plain = replace(stream, facts=msgspec.structs.replace(stream.facts, compaction=""))
    assert final["output"] == [ITEM, *fold(reader(DIALECT, plain).chunks(stream.lines))["output"]]
    assert final == msgspec.json.decode(response_of(stream.facts, DIALECT, stream.lines))


@given(singles)
def test_a_reader_after_any_number_gets_the_events_above_it(stream: Stream) -> None:
    lines = stream.lines
    whole = reader(DIALECT, stream).sse(lines, 1, 1)
    told = [data for data, _ in events(whole)]
    for number in range(-1, len(told)):
        after = frames_before(stream.facts, DIALECT, lines, number)
        one = encoder_after(stream.facts, DIALECT, lines[:after], number)
        rest = one.opening() + one.sse(lines[after:], 1, after + 1)
        assert [data for data, _ in events(rest)] == told[number + 1 :]


@given(whole_singles)
def test_the_official_helper_builds_it(canned_openai: CannedOpenAI, stream: Stream) -> None:
    built = canned_openai.response(reader(DIALECT, stream).sse(stream.lines, 1, 1))
    assert bare(built.to_dict()) == bare(fold(reader(DIALECT, stream).chunks(stream.lines)))
    assert built.output[0].type == "compaction" and built.output[0].encrypted_content == "AgAB\u00e9"


@given(singles)
def test_the_other_profile_has_no_such_item(stream: Stream) -> None:
    final = fold(encoder_for("open.responses", stream.facts).chunks(stream.lines))
    assert all(item["type"] != "compaction" for item in final["output"])


def test_gateways_of_the_release_before_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    request = read_asked(b'{"model":"m","input":"x"}').request([])
    assert StreamFacts.of(STREAM, 1, request).encoder == 3
    facts = StreamFacts.of(STREAM, 1, msgspec.structs.replace(request, compaction="Ag"))
    assert msgspec.json.decode(msgspec.json.encode(facts), type=StreamFacts) == facts
    monkeypatch.delitem(ENCODERS, 4)
    with pytest.raises(Unsupported, match="encoder 4"):
        encoder_for(DIALECT, facts)
