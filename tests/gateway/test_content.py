"""Prompts and completions in traces: only for tenants whose entry in the keys file allows it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.errors import FabricUnavailable
from stream_fabric.events import Phases, ReadEnd, RequestTrace, Role
from stream_fabric.limits import CONTENT_PROMPTS_BYTES_MAX, CONTENT_READS_MAX
from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import SCHEMA_MISMATCH, Close, Delta, Open, encode, encode_text
from stream_fabric.stream.ids import GatewayId, StreamId, TenantId, new_stream_id
from stream_fabric.stream.log import Entry, Page
from stream_gw.auth import key_digest, new_key
from stream_gw.observe.content import Contents, Text, cut, prompt_of
from stream_gw.observe.trace import ReaderOutcome
from tests.gateway.processes import Process, Running
from tests.gateway.test_request_traces import Told
from tests.gateway.wire import Gate, chat, events, text
from tests.support.events import Heard

pytestmark = pytest.mark.platform

ACME, GLOBEX = TenantId("acme"), TenantId("globex")
PLAN = {ACME: 40}
BODY = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3})


class OneLog:
    """A log that holds the same frames of every stream."""

    def __init__(self, *lines: bytes) -> None:
        self.lines = lines
        self.asked: list[tuple[StreamId, TenantId | None]] = []
        self.away = False
        self.answers = asyncio.Event()
        self.answers.set()

    async def watch(
        self, stream: StreamId, tenant: TenantId | None, gateway: GatewayId | None, after: Cursor
    ) -> Page | None:
        assert gateway is None, "it is read, not followed"
        self.asked.append((stream, tenant))
        await self.answers.wait()
        if self.away:
            raise FabricUnavailable("away")
        entries = tuple(Entry(1, seq, seq, line) for seq, line in enumerate(self.lines, 1) if seq > after.seq)
        structure = b"\n".join(b"%d %b" % (seq, line) for seq, line in enumerate(self.lines, 1) if line[0] == 0x7B)
        return Page(Epoch(1, "aa"), len(self.lines), "completed", b"", (), structure, ACME, entries[:2])


class Rig:
    def __init__(self, *lines: bytes, one_in: int = 1) -> None:
        self.heard = Heard()
        self.log = OneLog(*(lines or (encode(Open(0, 0, "text")), encode_text(0, "hello "), encode_text(0, "there"))))
        self.tasks: list[asyncio.Task[None]] = []
        self.contents = Contents(self.heard, lambda tenant: PLAN.get(tenant, 0), self.log, self._spawn, one_in)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def told(self) -> list[RequestTrace]:
        await asyncio.gather(*self.tasks)
        return self.heard.requests


def stream() -> StreamId:
    return new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))


def trace(
    tenant: TenantId, of: StreamId, role: Role = "created", ended: ReadEnd = "completed", **more: Any
) -> RequestTrace:
    facts = {"streamed_tokens": 2, "first_seq": 1, "last_seq": 3, **more}
    return RequestTrace("id", 1, GatewayId("g"), role, ended, tenant, 1, Phases(), stream=of, **facts)


async def test_traces_of_an_allowed_tenant_hold_prompt_and_completion() -> None:
    rig, one = Rig(), stream()
    rig.contents.receive_prompt(ACME, one, BODY)
    rig.contents.emit(trace(ACME, one))
    (told,) = await rig.told()
    assert told.prompt == '{"messages":[{"role":"user","content":"a'
    assert told.completion == "hello there"
    assert rig.log.asked[0] == (one, ACME), "another tenant's stream is none"
    assert rig.contents.held_bytes == 0


@given(
    tenant=st.sampled_from([GLOBEX, TenantId(""), TenantId("acme "), TenantId("ACME")]),
    role=st.sampled_from(["created", "attached", "resumed", "refused"]),
    ended=st.sampled_from(["completed", "cancelled", "failed", "incomplete", "left", "stalled", "drained", "refused"]),
    tokens=st.integers(0, 3),
)
def test_no_other_tenants_trace_holds_content(tenant: TenantId, role: Role, ended: ReadEnd, tokens: int) -> None:
    async def run() -> None:
        rig, one = Rig(), stream()
        rig.contents.receive_prompt(tenant, one, BODY)
        assert rig.contents.held_bytes == 0
        rig.contents.emit(event := trace(tenant, one, role, ended, streamed_tokens=tokens))
        assert await rig.told() == [event]
        assert rig.log.asked == []

    asyncio.run(run())


async def test_a_followers_trace_holds_its_part_of_the_completion_and_no_prompt() -> None:
    rig, one = Rig(), stream()
    rig.contents.receive_prompt(ACME, one, BODY)
    rig.contents.emit(trace(ACME, one, "resumed", first_seq=3))
    (told,) = await rig.told()
    assert (told.prompt, told.completion) == ("", "there")
    rig.contents.emit(trace(ACME, one, "created", "left", last_seq=2))
    assert [(told.prompt[:2], told.completion) for told in await rig.told()][1:] == [('{"', "hello ")]


async def test_an_unreadable_log_leaves_the_trace_without_completion() -> None:
    rig, one = Rig(), stream()
    rig.log.away = True
    rig.contents.receive_prompt(ACME, one, BODY)
    rig.contents.emit(trace(ACME, one))
    (told,) = await rig.told()
    assert (told.completion, told.prompt != "") == ("", True)


async def test_a_process_that_ends_emits_the_trace_without_completion() -> None:
    rig = Rig()
    rig.log.answers.clear()
    rig.contents.emit(trace(ACME, stream()))
    await asyncio.sleep(0)
    rig.tasks[0].cancel()
    await asyncio.wait(rig.tasks)
    assert [told.completion for told in rig.heard.requests] == [""]


async def test_concurrent_reads_are_limited_and_further_traces_go_without() -> None:
    rig = Rig()
    rig.log.answers.clear()
    for _ in range(CONTENT_READS_MAX + 5):
        rig.contents.emit(trace(ACME, stream()))
    assert len(rig.heard.requests) == 5
    rig.log.answers.set()
    assert sum(told.completion != "" for told in await rig.told()) == CONTENT_READS_MAX
    rig.contents.emit(trace(ACME, stream()))
    assert (await rig.told())[-1].completion, "the others' places are free again"


async def test_kept_prompts_are_bounded() -> None:
    rig = Rig()
    PLAN[ACME] = 64 << 10
    try:
        body = msgspec.json.encode({"prompt": "x" * (64 << 10)})
        for _ in range(CONTENT_PROMPTS_BYTES_MAX // (64 << 10) + 20):
            rig.contents.receive_prompt(ACME, stream(), body)
            assert rig.contents.held_bytes <= CONTENT_PROMPTS_BYTES_MAX
    finally:
        PLAN[ACME] = 40
    assert rig.contents.held_bytes > CONTENT_PROMPTS_BYTES_MAX // 2


async def test_prompts_of_unsampled_traces_are_dropped() -> None:
    rig = Rig(one_in=1_000_000)
    ends: list[tuple[ReadEnd, str]] = [("completed", ""), ("completed", SCHEMA_MISMATCH), ("failed", "engine_error")]
    for ended, code in ends:
        one = stream()
        rig.contents.receive_prompt(ACME, one, BODY)
        rig.contents.receive_outcome(ReaderOutcome("p", "created", ended, 200, code, 1, 1, 1, "", "r", one, ACME))
        assert (rig.contents.held_bytes > 0) is (code != ""), "what fails is always told"
        rig.contents.emit(trace(ACME, one))


def test_blocks_other_than_text_are_named() -> None:
    lines = [
        encode(Open(0, 0, "reasoning", "raw")), encode_text(0, "well"), encode(Close(0)), encode(Open(1, 0, "text")),
        encode_text(1, "yes ☃"), encode(Open(2, 1, "text")), encode(Delta(2, "no", 1, msgspec.Raw(b"[]"))),
        encode(Open(3, 0, "tool", "function", "c", "look")), encode_text(3, '{"a":1}'),
        encode(Open(4, 0, "item")), encode_text(4, "[0.1,0.2]"),
    ]  # fmt: skip
    whole = Text(1000)
    for line in lines:
        whole.add(line)
    assert whole.whole() == '[reasoning]\nwell\nyes ☃\n[choice 1]\nno\n[tool look]\n{"a":1}'


@given(st.lists(st.text(max_size=20), max_size=20), st.integers(1, 60))
def test_a_text_is_cut_at_whole_characters(parts: list[str], bytes_max: int) -> None:
    whole = Text(bytes_max)
    whole.add(encode(Open(0, 0, "text")))
    for part in parts:
        whole.add(encode_text(0, part))
    said = "".join(msgspec.json.decode(encode_text(0, part)[1:], type=str) for part in parts)
    found = whole.whole()
    assert len(found.encode()) <= bytes_max
    assert said.startswith(found)
    assert len(found.encode()) > bytes_max - 4 or found == said


def test_a_prompt_holds_content_fields_and_no_sampling_parameters() -> None:
    body = b'{"model":"m","temperature":0.5,"user":"u","messages":[1],"tools":[2]}'
    assert prompt_of(body, 1000) == '{"messages":[1],"tools":[2]}'
    assert prompt_of(b'{"prompt":"caf\xc3\xa9"}', 15) == '{"prompt":"caf'
    assert cut(b"\xe2\x98\x83", 2) == ""


# --- on the platform ---------------------------------------------------------------------------------------------

OPENLY, SECRETLY = "tell it openly", "keep it secret"


@dataclass(frozen=True)
class Two:
    """Two gateways, each with the keys of two tenants."""

    acme: list[Gate]
    globex: list[Gate]
    processes: list[Process]


@pytest.fixture(scope="module")
def two_tenants(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    open_, closed = new_key(HostRandom()), new_key(HostRandom())
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        f"""
        [[tenant]]
        id = "acme"
        trace_content = true
        trace_content_bytes = 2000
        [[tenant.key]]
        sha256 = "{key_digest(open_)}"
        [[tenant]]
        id = "globex"
        trace_content_bytes = 2000
        [[tenant.key]]
        sha256 = "{key_digest(closed)}"
        """
    )
    env = {"STREAM_GW_KEYS_FILE": str(path), "STREAM_GW_ACCESS_LOG_ONE_IN": "1"}
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(platform.gateway("--gateway", name, **env)) for name in ("open1", "open2")]
        gates = {key: [Gate(p.facts["url"], p.pid, key) for p in found] for key in (open_, closed)}
        yield Two(gates[open_], gates[closed], found)


@pytest.fixture
async def source(platform: Running) -> AsyncIterator[RedisEvents]:
    client = RedisClient(platform.redis_url)
    await client.start()
    yield RedisEvents(client)
    await client.close()


def saying(words: str, tokens: int, **more: Any) -> dict[str, Any]:
    return chat(tokens, **more) | {"messages": [{"role": "user", "content": words}]}


async def everything(gates: list[Gate], words: str, told: Told) -> dict[str, list[RequestTrace]]:
    """One request per outcome, by outcome."""
    one, two = gates
    found: dict[str, list[RequestTrace]] = {}
    async with one.create(saying(words, 30)) as exchange:
        stream = exchange.headers["x-stream-id"]
        whole = text(events(await exchange.rest()))
    found["whole"] = await told.requests(stream)
    reply = await one.ask("POST", "/v1/chat/completions", saying(words, 20, stream=False))
    found["collected"] = await told.requests(reply.headers["x-stream-id"])
    key = {"idempotency-key": os.urandom(8).hex()}
    async with one.create(saying(words, 200), key) as exchange:
        stream = exchange.headers["x-stream-id"]
        last = (await exchange.events(20))[-1].id
    assert last
    async with two.create(saying(words, 200), key) as attached:
        assert attached.headers["x-stream-id"] == stream
        await attached.rest()
    async with two.open("GET", f"/v1/streams/{stream}", headers={"last-event-id": last}) as resumed:
        await resumed.rest()
    found["resumed"] = await told.requests(stream, 3)
    async with one.create(saying(words, 2000)) as exchange:
        stream = exchange.headers["x-stream-id"]
        await exchange.events(8)
        await two.cancel(stream)
        await exchange.rest()
    found["cancelled"] = await told.requests(stream)
    async with one.create(saying(words, 2000, deadline_s=0.5)) as exchange:
        stream = exchange.headers["x-stream-id"]
        await exchange.rest()
    found["failed"] = await told.requests(stream)
    reply = await one.ask("POST", "/v1/chat/completions", saying(words, 5, model="nobody's"))
    found["refused"] = [await told.request(reply.headers["x-request-id"])]
    assert found["failed"][0].ended == "failed"
    assert whole
    return found


async def test_content_of_allowed_tenants_only_through_the_platform(two_tenants: Two, source: RedisEvents) -> None:
    told = Told(source)
    openly = await everything(two_tenants.acme, OPENLY, told)
    secretly = await everything(two_tenants.globex, SECRETLY, told)

    (whole,) = openly["whole"]
    assert OPENLY in whole.prompt
    assert len(whole.completion.split()) > 10
    assert openly["collected"][0].completion
    by_role = {row.role: row for row in openly["resumed"]}
    assert set(by_role) == {"created", "attached", "resumed"}
    assert [role for role, row in by_role.items() if row.prompt] == ["created"]
    all_of_it = by_role["attached"].completion
    assert all_of_it.startswith(by_role["created"].completion)
    assert all_of_it.endswith(by_role["resumed"].completion)
    assert 0 < len(by_role["resumed"].completion) < len(all_of_it)
    for fate in ("cancelled", "failed"):
        (row,) = openly[fate]
        assert OPENLY in row.prompt
        assert row.completion

    rows = [row for rows in secretly.values() for row in rows]
    assert len(rows) == 8
    assert [(row.prompt, row.completion) for row in rows] == [("", "")] * len(rows)
    seen = 0
    found: list[bytes] = []
    while records := await source.read(seen, 500):
        seen = records[-1][0]
        found += [record for _, record in records]
    assert sum(SECRETLY.encode() in record for record in found) == 0
    assert sum(OPENLY.encode() in record for record in found) == 5
    for process in two_tenants.processes:
        assert '"request"' in process.log or "request" in process.log, "it is logged that there was one"
        assert OPENLY not in process.log
        assert SECRETLY not in process.log
        assert whole.completion[:40] not in process.log
