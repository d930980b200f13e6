"""A response is stored by itself: whoever dies after its create, and as long as the database is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from stream_fabric.accounts.records import PlanRecord
from stream_fabric.accounts.stored import DueResponse, Queue
from stream_fabric.errors import FabricUnavailable, Unsupported
from stream_fabric.limits import RETENTION_S
from stream_fabric.stream.frames import Close, Delta, End, ErrorInfo, Open, Usage
from stream_fabric.stream.ids import StreamId
from stream_gw.responses import (
    ItemNotFound,
    ResponseNotFound,
    ResponseStorageFull,
    ResponsesUnavailable,
    ResponseTooLarge,
    StorePolicy,
)
from stream_gw.tenancy.sql.responses import NewRow
from tests.responses.conftest import ACME, GLOBEX, NOWHERE, Gateway, Opener, Platform, prefix_of
from tests.support.waiting import eventually

NEVER = "resp_" + "0" * 32


def said(answer: str) -> list[dict[str, Any]]:
    return [{"type": "output_text", "text": answer, "annotations": [], "logprobs": []}]


async def test_a_response_is_read_from_its_log_then_its_record_then_the_database(
    platform: Platform, gateway: Gateway
) -> None:
    record = platform.response("Hi", metadata={"a": "b"}, instructions="Be kind")
    assert await gateway.store.begun(ACME, record)
    await platform.create(record)
    running = await gateway.store.read(ACME, record.id)
    assert running is not None and running.output is None and running.metadata == {"a": "b"}
    await platform.end(record, "Hello")
    from_log = await gateway.store.read(ACME, record.id)
    assert from_log is not None and from_log.response is not None and from_log.output is not None
    assert from_log.response["status"] == "completed" and from_log.response["usage"]["output_tokens"] == 3
    assert from_log.output[0]["content"] == said("Hello")
    await platform.log.delete(record.id, ACME)
    assert await gateway.store.read(ACME, record.id) == from_log, "the record has it, the log is gone"
    await eventually(lambda: gateway.is_saved(record.id))
    await gateway.leaves_redis(record.id)
    assert await gateway.store.read(ACME, record.id) == from_log
    assert gateway.outcomes == ["saved"]


async def test_another_gateway_stores_what_a_dead_one_began(platform: Platform, open_gateway: Opener) -> None:
    """The gateway dies after the stream's end and before the write; a third one dies in the middle of the write."""
    dead, dying, alive = [await open_gateway() for _ in range(3)]
    response = await dead.stored()

    async def is_taken() -> bool:
        """The dying gateway takes the response, and does nothing more."""
        taken = [await dying.held.due(shard, "unsaved") for shard in range(dying.held.shards)]
        return any(due.id == response for each in taken for due in each)

    await eventually(lambda: is_completed(alive, response))
    await eventually(is_taken)
    await eventually(lambda: alive.is_saved(response))


async def is_completed(gateway: Gateway, response: StreamId) -> bool:
    await gateway.upkeep.look()
    found = await gateway.held.find(ACME, response)
    return found is not None and found != "deleted" and bool(found.response)


async def test_a_response_is_written_once_however_many_gateways_write_it(open_gateway: Opener) -> None:
    gateways = [await open_gateway() for _ in range(3)]
    response = await gateways[0].stored()
    await eventually(lambda: is_completed(gateways[0], response))
    assert all(await asyncio.gather(*(each.records.save(ACME, response) for each in gateways)))
    rows = gateways[0].rows
    assert rows is not None
    row = await rows.find(ACME, response)
    assert row is not None and await rows.bytes(ACME) == row.bytes


async def test_redis_keeps_what_the_database_does_not_take(platform: Platform, open_gateway: Opener) -> None:
    platform.plans[ACME] = PlanRecord("short", retention_s=1)
    away = await open_gateway(url=NOWHERE)
    response = await away.stored()
    await eventually(lambda: is_completed(away, response))
    await away.upkeep.save()
    assert away.outcomes[0] == "deferred"
    assert await away.held.unsaved() == 1
    assert await away.store.read(ACME, response) is not None, "Redis has it"
    with pytest.raises(ResponsesUnavailable, match="cannot be reached"):
        await away.store.read(ACME, NEVER)
    key = f"{prefix_of(ACME)}r:{response}"
    assert await platform.client.execute(0, "PTTL", key) > 3_600_000, "longer than its plan keeps it"
    back = await open_gateway()
    await eventually(lambda: back.is_saved(response))
    assert await platform.client.execute(0, "PTTL", key) <= 1000
    assert await back.held.unsaved() == 0


async def test_responses_are_stored_while_the_shards_of_other_tenants_are_away(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that say nothing delay no look at this one: its log is kept for a while only."""
    monkeypatch.setattr("stream_fabric.redis.tenancy.responses._FIRST_LOOK_MS", 0)
    response, due = await gateway.stored(), gateway.held.due
    name = prefix_of(ACME)
    shard = int(name[name.index("rsp") + 3 : name.index("}")])
    assert shard > 0, "another one is read before it"
    refused = asyncio.Event()

    async def away(asked: int, queue: Queue) -> Sequence[DueResponse]:
        if asked != shard:
            await refused.wait()
            raise FabricUnavailable("Redis is away")
        return await due(asked, queue)

    async def is_found() -> bool:
        found = await gateway.held.find(ACME, response)
        return found is not None and found != "deleted" and bool(found.response)

    monkeypatch.setattr(gateway.held, "due", away)
    looking = asyncio.create_task(gateway.upkeep.look())
    await eventually(is_found, "the response to be complete", 10.0)
    refused.set()
    with pytest.raises(FabricUnavailable):
        await looking

    async def is_saved() -> bool:
        for job in (gateway.upkeep.look, gateway.upkeep.save):
            with pytest.raises(FabricUnavailable):
                await job()
        assert gateway.rows is not None
        return await gateway.rows.find(ACME, response) is not None

    await eventually(is_saved, "the response to be in the database", 10.0)


async def test_a_gateway_counts_what_waits_for_the_database_also_without_one(open_gateway: Opener) -> None:
    without, told = await open_gateway(url=None), asyncio.Queue[int]()
    response = await (away := await open_gateway(url=NOWHERE)).stored()
    await eventually(lambda: is_completed(away, response))
    counting = asyncio.create_task(without.upkeep.run_counts(told.put_nowait))
    async with asyncio.timeout(10):
        assert await told.get() == 1
    counting.cancel()


async def test_a_frozen_database_answers_503_in_time(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_gw.responses.database.RESPONSE_SQL_S_MAX", 0.1)
    assert gateway.rows is not None
    frozen = asyncio.Event()

    async def hang(connection: object) -> None:
        await frozen.wait()

    with pytest.raises(ResponsesUnavailable, match=r"did not answer in 0\.1 s"):
        await gateway.rows._ask(ACME, hang)
    frozen.set()


async def test_one_tenant_leaves_the_database_to_the_others(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of what is stored meet no other limit: one client could have all others refused."""
    monkeypatch.setattr("stream_gw.responses.database.RESPONSE_SQL_TENANT_CALLS_MAX", 2)
    rows = gateway.rows
    assert rows is not None
    ends = asyncio.Event()

    async def hang(connection: object) -> None:
        await ends.wait()

    asked = [asyncio.create_task(rows._ask(ACME, hang)) for _ in range(2)]
    await eventually(lambda: rows._asking[ACME] == 2)
    with pytest.raises(ResponsesUnavailable, match="2 requests of your tenant"):
        await rows.find(ACME, NEVER)
    assert await rows.find(GLOBEX, NEVER) is None
    assert await rows.sweep() == 0, "upkeep is nobody's"
    ends.set()
    await asyncio.gather(*asked)
    assert await rows.find(ACME, NEVER) is None and not rows._asking


async def test_a_failed_stream_is_stored_with_its_error(platform: Platform, gateway: Gateway) -> None:
    record = platform.response()
    await gateway.store.begun(ACME, record)
    await platform.create(record)
    error = ErrorInfo("engine_error", "the engine broke")
    frames = [Open(0, 0, "reasoning"), Delta(0, "Hm"), Close(0, "sig"), Open(1, 0, "tool", "function", "c1", "f"),
              Delta(1, '{"a'), End("failed", Usage(5), error)]  # fmt: skip
    await platform.write(record, frames, "failed")
    found = await gateway.store.read(ACME, record.id)
    assert found is not None and found.response is not None
    assert found.response["status"] == "failed"
    assert found.response["error"] == {"code": "engine_error", "message": "the engine broke"}
    thought, call = found.response["output"]
    assert thought["encrypted_content"] == "sig" and thought["content"] == [{"type": "reasoning_text", "text": "Hm"}]
    assert (call["call_id"], call["name"], call["arguments"], call["status"]) == ("c1", "f", '{"a', "incomplete")


async def test_a_response_without_a_stream_is_forgotten(
    platform: Platform, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway died between the record and the stream's create."""
    monkeypatch.setattr("stream_gw.responses.held.RESPONSE_NO_LOG_S_MAX", 0.0)
    record = platform.response()
    await gateway.store.begun(ACME, record)

    async def is_gone() -> bool:
        await gateway.upkeep.look()
        return await gateway.held.find(ACME, record.id) is None

    await eventually(is_gone)
    assert gateway.outcomes == ["no_stream"]


async def test_a_withdrawn_response_leaves_nothing(platform: Platform, gateway: Gateway) -> None:
    record = platform.response()
    await gateway.store.begun(ACME, record)
    await gateway.store.withdrawn(ACME, record.id)
    assert await gateway.store.read(ACME, record.id) is None
    assert await platform.client.execute(0, "KEYS", "sg:{rsp*") == [
        key for key in await platform.client.execute(0, "KEYS", "sg:{rsp*") if b":b:" in key
    ]


# --- what is not stored -------------------------------------------------------------------------------------------


async def test_nothing_is_kept_without_the_wish_or_the_right(platform: Platform, gateway: Gateway) -> None:
    platform.plans[GLOBEX] = PlanRecord("zero", retention_s=0)
    assert not await gateway.store.begun(ACME, platform.response(store=False))
    assert not await gateway.store.begun(GLOBEX, platform.response())
    assert not gateway.store.stores(GLOBEX, store=True) and gateway.store.stores(ACME, store=True)
    assert await platform.client.execute(0, "KEYS", "*rsp*") == []
    with pytest.raises(Unsupported, match="leave conversation out"):
        await gateway.store.begun(ACME, platform.response(store=False, conversation="conv_x"))


async def test_a_plan_without_days_keeps_responses_as_long_as_streams(platform: Platform, gateway: Gateway) -> None:
    platform.plans[ACME] = PlanRecord("short", response_days=0)
    response = await gateway.stored()
    await eventually(lambda: is_completed(gateway, response))
    await gateway.upkeep.save()
    assert gateway.rows is not None and await gateway.rows.find(ACME, response) is None
    assert 0 < await platform.client.execute(0, "PTTL", f"{prefix_of(ACME)}r:{response}") <= RETENTION_S * 1000


async def test_a_gateway_without_a_database_leaves_the_write_to_others(open_gateway: Opener) -> None:
    without, with_one = await open_gateway(url=None), await open_gateway()
    response = await without.stored()
    await eventually(lambda: is_completed(without, response))
    await without.upkeep.save()
    await eventually(lambda: with_one.is_saved(response))


async def test_every_key_expires(platform: Platform, gateway: Gateway, open_gateway: Opener) -> None:
    full = await open_gateway(policy=StorePolicy(stored_bytes_max=1))
    await full.stored()
    response = await full.stored()
    await eventually(lambda: full.is_saved(response))
    await gateway.store.delete(ACME, response)
    await gateway.store.begun(GLOBEX, platform.response())
    await gateway.upkeep.look()
    keys = await platform.client.execute(0, "KEYS", "sg:{rsp*")
    assert len(keys) >= 6
    for key in keys:
        assert await platform.client.execute(0, "PTTL", key) > 0, key


# --- bounds -------------------------------------------------------------------------------------------------------


async def test_a_request_over_the_bound_is_refused(platform: Platform, open_gateway: Opener) -> None:
    gateway = await open_gateway(policy=StorePolicy(bytes_max=2000))
    with pytest.raises(ResponseTooLarge, match="2000"):
        await gateway.store.begun(ACME, platform.response("x" * 3000))


async def test_an_output_over_the_bound_is_not_stored(platform: Platform, open_gateway: Opener) -> None:
    gateway = await open_gateway(policy=StorePolicy(bytes_max=2000))
    response = await gateway.stored(answer="x" * 3000)
    assert await gateway.store.read(ACME, response) is None
    assert gateway.outcomes == ["too_large"]


async def test_a_tenant_fills_redis_only_up_to_its_bound(platform: Platform, open_gateway: Opener) -> None:
    """Responses that the database has make room first; others stay."""
    gateway = await open_gateway(held_bytes_max=6000)
    noise = platform.random.token_hex
    saved = await gateway.stored(text=noise(3000))
    await eventually(lambda: gateway.is_saved(saved))
    await gateway.stored(text=noise(3000))
    assert await gateway.held.find(ACME, saved) is None, "it has made room"
    found = await gateway.store.read(ACME, saved)
    assert found is not None, "the database has it"
    with pytest.raises(ResponseStorageFull) as raised:
        await gateway.store.begun(ACME, platform.response(noise(3000)))
    assert (raised.value.http_status, raised.value.code) == (429, "response_storage_full")
    assert await gateway.store.begun(GLOBEX, platform.response(noise(3000))), "another tenant has its own bound"


async def test_a_tenant_fills_the_database_only_up_to_its_bound(platform: Platform, open_gateway: Opener) -> None:
    gateway = await open_gateway(policy=StorePolicy(stored_bytes_max=100))
    response = await gateway.stored()
    await eventually(lambda: gateway.is_saved(response))
    with pytest.raises(ResponseStorageFull):
        await gateway.store.begun(ACME, platform.response())
    assert await gateway.store.begun(GLOBEX, platform.response())


# --- deletion and expiry ------------------------------------------------------------------------------------------


async def test_a_deleted_response_is_gone_everywhere(platform: Platform, gateway: Gateway) -> None:
    response = await gateway.stored()
    await eventually(lambda: gateway.is_saved(response))
    assert await gateway.store.delete(ACME, response)
    assert await gateway.store.read(ACME, response) is None
    assert gateway.rows is not None and await gateway.rows.find(ACME, response) is None
    assert await gateway.rows.bytes(ACME) == 0
    assert await platform.log.watch(response, ACME, None, (1, 0)) is None  # type: ignore[arg-type]
    assert not await gateway.store.delete(ACME, response)


async def test_a_deletion_wins_over_a_write_that_runs(open_gateway: Opener) -> None:
    """Another gateway has read the record, and writes it after the deletion."""
    slow, fast = await open_gateway(), await open_gateway()
    response = await slow.stored()
    await eventually(lambda: is_completed(slow, response))
    row = await slow.records.prepare(ACME, response)
    assert isinstance(row, NewRow) and slow.rows is not None
    assert await fast.store.delete(ACME, response)
    await slow.rows.insert_all([row])
    assert fast.rows is not None and await fast.rows.find(ACME, response) is not None
    assert await fast.store.read(ACME, response) is None, "nobody sees it meanwhile"

    async def is_gone() -> bool:
        await fast.upkeep.save()
        assert fast.rows is not None
        return await fast.rows.find(ACME, response) is None

    await eventually(is_gone)


async def test_a_deletion_without_the_database_is_told_and_repeated(open_gateway: Opener) -> None:
    gateway, away = await open_gateway(), await open_gateway(url=NOWHERE)
    response = await gateway.stored()
    await eventually(lambda: gateway.is_saved(response))
    with pytest.raises(ResponsesUnavailable):
        await away.store.delete(ACME, response)
    assert await gateway.store.read(ACME, response) is None

    async def is_gone() -> bool:
        await gateway.upkeep.save()
        assert gateway.rows is not None
        return await gateway.rows.find(ACME, response) is None

    await eventually(is_gone)


async def test_rows_expire_with_the_plans_days(platform: Platform, gateway: Gateway) -> None:
    platform.plans[ACME] = PlanRecord("short", response_days=1)
    old = await gateway.stored(created_at=platform.response().created_at - 2 * 86_400)
    new = await gateway.stored()
    await eventually(lambda: gateway.is_saved(new))
    await gateway.records.save(ACME, old)
    await gateway.leaves_redis(old)
    assert await gateway.store.read(ACME, old) is None, "before any sweep"
    assert gateway.rows is not None
    assert await gateway.rows.sweep() == 1 and await gateway.rows.sweep() == 0
    row = await gateway.rows.find(ACME, new)
    assert row is not None and await gateway.rows.bytes(ACME) == row.bytes


# --- who may see --------------------------------------------------------------------------------------------------


async def test_ids_of_others_look_like_unknown_ones(gateway: Gateway) -> None:
    theirs = await gateway.stored(GLOBEX)
    of_ann = await gateway.stored(user="ann")
    in_sql = await gateway.stored(GLOBEX)
    await eventually(lambda: gateway.is_saved(in_sql, GLOBEX))
    await gateway.leaves_redis(in_sql, GLOBEX)
    for response, user in ((theirs, None), (in_sql, None), (of_ann, "bob"), (NEVER, None), ("x", None)):
        assert await gateway.store.read(ACME, response, user=user) is None
        assert not await gateway.store.delete(ACME, response, user=user)
        with pytest.raises(ResponseNotFound) as raised:
            await gateway.store.input_items(ACME, response, user=user)
        assert raised.value.message.replace(repr(response), repr(NEVER)) == ResponseNotFound(NEVER).message
    assert await gateway.store.read(GLOBEX, theirs) is not None
    assert await gateway.store.read(ACME, of_ann, user="ann") is not None


async def test_input_items_come_in_pages(platform: Platform, gateway: Gateway) -> None:
    items = [{"role": "user", "content": f"m{number}"} for number in range(5)]
    response = await gateway.stored(input=[*items, {"type": "function_call_output", "call_id": "c", "output": "o"}])
    newest = await gateway.store.input_items(ACME, response, limit=2)
    assert [item["type"] for item in newest.data] == ["function_call_output", "message"] and newest.has_more
    assert newest.data[1]["content"] == [{"type": "input_text", "text": "m4"}]
    body = newest.body()
    assert (body["first_id"], body["last_id"]) == (newest.data[0]["id"], newest.data[1]["id"])
    seen, after = [], None
    while True:
        page = await gateway.store.input_items(ACME, response, after, 4, "asc")
        seen += page.data
        if not page.has_more:
            break
        after = page.data[-1]["id"]
    assert len({item["id"] for item in seen}) == 6
    assert [item["content"][0]["text"] for item in seen[:5]] == [f"m{number}" for number in range(5)]
    with pytest.raises(ItemNotFound):
        await gateway.store.input_items(ACME, response, "msg_never")
