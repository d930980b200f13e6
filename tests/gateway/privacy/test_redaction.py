"""Redaction of stored content: what it finds in a labelled corpus, and that nothing unredacted leaves the gateway."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.events import Phases, ReadEnd, RequestTrace, Role
from stream_fabric.limits import REDACTIONS_MAX
from stream_fabric.stream.frames import Open, encode, encode_text
from stream_fabric.stream.ids import GatewayId, StreamId, TenantId, new_stream_id
from stream_gw.observe.content import Contents
from stream_gw.privacy.redaction.redact import redacted, redacted_prompt
from stream_gw.privacy.redaction.worker import Redactor, open_redactor
from tests.gateway.privacy.corpus import MAKERS, samples
from tests.support.events import Heard

ACME = TenantId("acme")
EMAIL, CARD = "jane.doe@example.com", "4111 1111 1111 1111"


def test_recall_and_precision_on_the_corpus() -> None:
    """The figures of docs/privacy.md; with ``-s`` they are printed."""
    found, all_, wrong, harmless = Counter[str](), Counter[str](), 0, 0
    for sample in samples(seed=1):
        text = redacted(sample.text, 10_000)
        if sample.kind == "none":
            harmless += 1
            wrong += text != sample.text
            continue
        all_[sample.kind] += 1
        found[sample.kind] += sample.secret not in text
    recall = {kind: found[kind] / all_[kind] for kind in MAKERS}
    total = sum(found.values())
    print({kind: round(value, 3) for kind, value in recall.items()})
    print(f"recall {total / sum(all_.values()):.3f}, precision {total / (total + wrong):.3f}, harmless {harmless}")
    assert min(recall.values()) >= 0.95, recall
    assert total / (total + wrong) >= 0.95


@given(st.text(max_size=300), st.integers(0, 400))
def test_redaction_keeps_within_its_bytes_and_never_fails(text: str, bytes_max: int) -> None:
    kept = redacted(text, bytes_max)
    assert len(kept.encode()) <= bytes_max
    assert redacted("plain words " + "x" * bytes_max, bytes_max) == ("plain words " + "x" * bytes_max)[:bytes_max]


@pytest.mark.parametrize("cut", range(1, len(CARD) + 4))
def test_a_cut_leaves_no_part_of_a_secret(cut: int) -> None:
    kept = redacted(f"to {CARD} and more", 3 + cut)
    assert not any(char.isdecimal() for char in kept), kept


def test_a_prompt_is_redacted_string_by_string() -> None:
    body = msgspec.json.encode(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": f"line\n{CARD}\nmail\t{EMAIL}"},
                {"role": "user", "content": [{"type": "text", "text": "jane\\u0040"}, {"n": 4111111111111111}]},
            ],
        }
    ).replace(b"@", b"\\u0040")
    told = redacted_prompt(body, ("messages", "prompt"), 10_000)
    parsed = msgspec.json.decode(told)["messages"]
    assert parsed[0]["content"] == "line\n[card]\nmail\t[email]"
    assert parsed[1]["content"][1] == {"n": "[number]"}
    assert len(redacted_prompt(body, ("messages",), 20).encode()) <= 20


class OneText:
    """A log that holds one text of every stream."""

    def __init__(self, text: str) -> None:
        self.lines = (encode(Open(0, 0, "text")), *(encode_text(0, char) for char in text))

    async def watch(self, *args: Any) -> Any:
        from tests.gateway.test_content import OneLog

        return await OneLog(*self.lines).watch(*args)


class Rig:
    def __init__(self, redactor: Redactor | None) -> None:
        self.bytes_max = 1000
        self.redacts = True
        self.heard = Heard()
        self.tasks: list[asyncio.Task[None]] = []
        self.contents = Contents(
            self.heard,
            lambda tenant: self.bytes_max,
            OneText(f"write to {EMAIL}"),
            self._spawn,
            1,
            lambda tenant: self.redacts,
            redactor,  # type: ignore[arg-type]
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def told(
        self, role: Role = "created", ended: ReadEnd = "completed", prompt: str = f"my card {CARD}", **plan_then: int
    ) -> RequestTrace:
        """Return the trace of a stream. ``plan_then``: terms that change while it runs."""
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        body = msgspec.json.encode({"model": "m", "prompt": prompt})
        self.contents.receive_prompt(ACME, stream, body)
        vars(self).update(plan_then)
        self.contents.emit(trace(stream, role, ended))
        await asyncio.gather(*self.tasks)
        return self.heard.requests[-1]


def trace(stream: StreamId, role: Role, ended: ReadEnd) -> RequestTrace:
    return RequestTrace(
        "id", 1, GatewayId("g"), role, ended, ACME, 1, Phases(), stream=stream, streamed_tokens=2, first_seq=1,
        last_seq=99,
    )  # fmt: skip


async def test_traces_hold_redacted_content_only() -> None:
    async with open_redactor() as redactor:
        told = await Rig(redactor).told()
        assert told.prompt == '{"prompt":"my card [card]"}'
        assert told.completion == "write to [email]"
        left = await Rig(redactor).told(ended="left")
        assert (left.prompt, left.completion) == ('{"prompt":"my card [card]"}', ""), "half a secret may remain"


async def test_a_plan_that_changes_while_a_stream_runs_uncovers_nothing() -> None:
    async with open_redactor() as redactor:
        told = await Rig(redactor).told(redacts=False)
        assert (told.prompt, told.completion) == ('{"prompt":"my card [card]"}', "write to [email]")
        rig = Rig(redactor)
        told = await rig.told(bytes_max=0)
        assert told.prompt == told.completion == ""
        assert rig.contents.held_bytes == 0


async def test_without_the_packages_content_is_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(None)
    for _ in range(2):
        told = await rig.told()
        assert told.prompt == told.completion == ""
    assert rig.contents.held_bytes == 0
    assert sum("stream-gw[privacy]" in record.message for record in caplog.records) == 1


async def test_a_full_redactor_stores_nothing() -> None:
    async with open_redactor() as redactor:
        waiting = [
            asyncio.create_task(redactor.redact(None, (), f"{EMAIL} " * 200, 10_000)) for _ in range(REDACTIONS_MAX)
        ]
        await asyncio.sleep(0)
        assert redactor.full
        told = await Rig(redactor).told()
        assert told.prompt == told.completion == ""
        await asyncio.gather(*waiting)
        assert not redactor.full


async def test_the_loop_goes_on_while_text_is_redacted() -> None:
    """A thread that never lets go would stop the loop for its switch interval of 5 ms again and again."""
    loop = asyncio.get_running_loop()
    async with open_redactor() as redactor:
        dense = f"call +1 415-555-2671 or {CARD} or {EMAIL} " * 700
        work = asyncio.create_task(redactor.redact(None, (), dense, 64 << 10))
        turns = 0
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 20
        assert loop.is_running()
        assert "[phone]" in (await work)[1]
