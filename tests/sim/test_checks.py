"""Moderation and the check of replies, where a stream goes on with another replica."""

from __future__ import annotations

import msgspec
import pytest

from stream_fabric.pool.records import EngineRequest
from stream_fabric.ports import FrameSink
from stream_fabric.stream.frames import Delta, decode
from stream_fabric.stream.log import StreamState
from tests.sim.checks import moderator
from tests.sim.hosts import WorldEngine
from tests.sim.test_takeovers import Stage

_submit = WorldEngine.submit


def submit_otherwise(self: WorldEngine, request: EngineRequest, sink: FrameSink) -> None:
    """Answer a request to go on in other words, as a model that samples does."""
    if request.own_chars:
        body = msgspec.json.decode(request.body) | {"prompt": "Say something else."}
        request = msgspec.structs.replace(request, body=msgspec.Raw(msgspec.json.encode(body)), own_chars=0)
    _submit(self, request, sink)


def moderated(flagged: str, seed: int) -> tuple[StreamState, str]:
    """Run a moderated completion whose replica dies. The other one is asked to go on, and chooses other words."""
    stage = Stage(faults=["moderation"], seed=seed, planted=[(WorldEngine, "submit", submit_otherwise)])
    stage.w.flagged = flagged
    stage.w.moderator = moderator(stage.w, None)
    stage.ask(0.3, kind="completions", max_tokens=120)
    stage.at(1.0, lambda: stage.w.chaos.kill(stage.producer()))
    state, end = stage.run()
    return state, end.status


def said(state: StreamState) -> list[str]:
    """The text of each epoch."""
    texts = {1: "", 2: ""}
    for entry in state.entries:
        frames = map(decode, entry.frames.split(b"\n"))
        texts[entry.epoch] += "".join(frame.text for frame in frames if isinstance(frame, Delta))
    return list(texts.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_phrase_that_two_replicas_say_together_is_flagged(seed: int) -> None:
    state, status = moderated("", seed)
    first, second = said(state)
    assert status == "completed" and min(len(first), len(second)) > 50
    flagged = first[-12:] + second[:12]
    state, status = moderated(flagged, seed)
    assert status == "incomplete"
    assert said(state) == [first, ""], "nothing of the second part is told"
