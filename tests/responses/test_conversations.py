"""Conversations: their items, one response at a time, and who may see them."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stream_fabric.accounts.records import PlanRecord
from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.stream.ids import StreamId
from stream_gw.responses import (
    ConversationLocked,
    ConversationNotFound,
    HistoryTooLong,
    Item,
    ItemNotFound,
    ResponseRecord,
    ResponseStorageFull,
    ResponsesUnavailable,
    StorePolicy,
)
from stream_gw.tenancy import NoDatabase
from tests.responses.conftest import ACME, GLOBEX, NOWHERE, Gateway, Opener, Platform
from tests.responses.test_compaction import window_item
from tests.responses.test_lineage import texts
from tests.support.waiting import eventually

NEVER = "conv_" + "0" * 32


async def begun(gateway: Gateway, conversation: str, text: str = "Hi") -> ResponseRecord:
    """Begin a response in a conversation, as a create does: its history first."""
    await gateway.store.history(ACME, None, conversation)
    record = gateway.platform.response(text, conversation=conversation)
    assert await gateway.store.begun(ACME, record)
    await gateway.platform.create(record)
    return record


def user(text: str) -> Item:
    return {"role": "user", "content": text}


async def test_responses_add_their_items_in_order(platform: Platform, gateway: Gateway) -> None:
    """No job runs: the next request adds what the last response made."""
    made = await gateway.store.conversations.create(ACME, {"a": "b"}, [user("first")])
    for number in range(3):
        record = await begun(gateway, made.id, f"q{number}")
        await platform.end(record, f"a{number}")
    items = await gateway.store.history(ACME, None, made.id)
    assert texts(items) == ["first", "q0", "a0", "q1", "a1", "q2", "a2"]
    assert len({item["id"] for item in items}) == 7
    found = await gateway.store.conversations.read(ACME, made.id)
    assert found.body() | {"created_at": 0} == {
        "id": made.id, "object": "conversation", "created_at": 0, "metadata": {"a": "b"}
    }  # fmt: skip


async def test_items_of_a_response_that_has_just_ended_are_read(platform: Platform, gateway: Gateway) -> None:
    """No job runs, and no later request either."""
    conversations = gateway.store.conversations
    made = await conversations.create(ACME, {}, [])
    running = await begun(gateway, made.id, "q0")
    assert (await conversations.items(ACME, made.id)).data == [], "one that runs has added nothing, and delays no read"
    await platform.end(running, "a0")
    assert texts((await conversations.items(ACME, made.id, order="asc")).data) == ["q0", "a0"]
    for call in (conversations.item, conversations.delete_item):
        ended = await begun(gateway, made.id)
        await platform.end(ended)
        await call(ACME, made.id, f"msg_{ended.id[5:]}1")


async def test_the_job_adds_the_items_of_a_dead_gateways_response(platform: Platform, open_gateway: Opener) -> None:
    dead, alive = await open_gateway(), await open_gateway()
    made = await dead.store.conversations.create(ACME, {}, [])
    record = await begun(dead, made.id)
    await platform.end(record)
    await eventually(lambda: alive.is_saved(record.id))
    assert await alive.held.runs_in(ACME, made.id) is None, "it is unlocked"
    page = await alive.store.conversations.items(ACME, made.id, order="asc")
    assert texts(page.data) == ["Hi", "Hello"]


async def test_two_responses_do_not_run_at_once(platform: Platform, gateway: Gateway) -> None:
    made = await gateway.store.conversations.create(ACME, {}, [])
    first = await begun(gateway, made.id)
    with pytest.raises(ConversationLocked) as raised:
        await gateway.store.history(ACME, None, made.id)
    assert (raised.value.http_status, raised.value.code) == (400, "conversation_locked")
    with pytest.raises(ConversationLocked):  # its history was read before the first one began
        await gateway.store.begun(ACME, platform.response(conversation=made.id))
    with pytest.raises(ConversationLocked):
        await gateway.store.conversations.add(ACME, made.id, [user("x")])
    await gateway.store.begun(ACME, first)  # a repeated call is no second response
    await platform.end(first)
    assert len(await gateway.store.history(ACME, None, made.id)) == 2
    second = await begun(gateway, made.id)
    await gateway.store.withdrawn(ACME, second.id)
    await begun(gateway, made.id)


async def test_a_response_on_an_old_history_is_refused(platform: Platform, gateway: Gateway) -> None:
    """Another response began and ended between this one's history and its begin."""
    made = await gateway.store.conversations.create(ACME, {}, [user("m")])
    old = await gateway.store.history(ACME, None, made.id)
    other = await begun(gateway, made.id)
    await platform.end(other)
    now = await gateway.store.history(ACME, None, made.id)
    with pytest.raises(ConversationLocked):
        await gateway.store.begun(ACME, platform.response(conversation=made.id), old)
    assert await gateway.store.begun(ACME, platform.response(conversation=made.id), now)


async def test_items_are_added_listed_and_deleted(gateway: Gateway) -> None:
    conversations = gateway.store.conversations
    made = await conversations.create(ACME, {}, [])
    added = await conversations.add(ACME, made.id, [user(f"m{number}") for number in range(5)])
    assert len(added.data) == 5 and all(item["id"].startswith("msg_") for item in added.data)
    first = await conversations.items(ACME, made.id, limit=2)
    assert texts(first.data) == ["m4", "m3"] and first.has_more
    rest = await conversations.items(ACME, made.id, first.data[-1]["id"], limit=3)
    assert texts(rest.data) == ["m2", "m1", "m0"] and not rest.has_more
    oldest = await conversations.items(ACME, made.id, rest.data[-1]["id"], order="asc")
    assert texts(oldest.data) == ["m1", "m2", "m3", "m4"]
    one = added.data[1]
    assert await conversations.item(ACME, made.id, one["id"]) == one
    await conversations.delete_item(ACME, made.id, one["id"])
    for call in (conversations.item, conversations.delete_item):
        with pytest.raises(ItemNotFound):
            await call(ACME, made.id, one["id"])
    with pytest.raises(ItemNotFound):
        await conversations.items(ACME, made.id, one["id"])
    assert texts(await gateway.store.history(ACME, None, made.id)) == ["m0", "m2", "m3", "m4"]


async def test_a_deleted_conversation_frees_its_bytes(platform: Platform, gateway: Gateway) -> None:
    conversations, rows = gateway.store.conversations, gateway.rows
    assert rows is not None
    made = await conversations.create(ACME, {}, [user("m0"), user("m1")])
    assert await rows.bytes(ACME) > 0
    running = await begun(gateway, made.id)
    await conversations.delete(ACME, made.id)
    assert await rows.bytes(ACME) == 0
    with pytest.raises(ConversationNotFound):
        await gateway.store.history(ACME, None, made.id)
    await platform.end(running)
    await eventually(lambda: gateway.is_saved(running.id))
    row = await rows.find(ACME, running.id)
    assert row is not None and await rows.bytes(ACME) == row.bytes, "the response stays; its items were not added"


async def test_ids_of_others_look_like_unknown_ones(gateway: Gateway) -> None:
    conversations = gateway.store.conversations
    made = await conversations.create(ACME, {}, [user("m")], user="ann")
    [item] = (await conversations.items(ACME, made.id, user="ann")).data
    calls: list[Any] = [
        lambda tenant, id_, who: conversations.read(tenant, id_, who),
        lambda tenant, id_, who: conversations.change(tenant, id_, {}, who),
        lambda tenant, id_, who: conversations.delete(tenant, id_, who),
        lambda tenant, id_, who: conversations.history(tenant, id_, who),
        lambda tenant, id_, who: conversations.items(tenant, id_, user=who),
        lambda tenant, id_, who: conversations.add(tenant, id_, [user("x")], who),
        lambda tenant, id_, who: conversations.item(tenant, id_, item["id"], who),
        lambda tenant, id_, who: conversations.delete_item(tenant, id_, item["id"], who),
    ]
    for call in calls:
        for tenant, id_, who in ((GLOBEX, made.id, None), (ACME, made.id, "bob"), (ACME, "x", None)):
            with pytest.raises(ConversationNotFound) as raised:
                await call(tenant, id_, who)
            told = raised.value.message.replace(repr(id_), repr(NEVER))
            assert told == ConversationNotFound(NEVER).message
    assert (await conversations.read(ACME, made.id, "ann")).user == "ann"


async def test_a_conversation_needs_a_database_and_a_plan_that_stores(
    platform: Platform, gateway: Gateway, open_gateway: Opener
) -> None:
    without, away = await open_gateway(url=None), await open_gateway(url=NOWHERE)
    with pytest.raises(NoDatabase):
        await without.store.conversations.create(ACME, {}, [])
    with pytest.raises(ResponsesUnavailable):
        await away.store.conversations.create(ACME, {}, [])
    for plan in (PlanRecord("zero", retention_s=0), PlanRecord("short", response_days=0)):
        platform.plans[ACME] = plan
        with pytest.raises(Unsupported):
            await gateway.store.conversations.create(ACME, {}, [])


async def test_what_a_response_builds_on_is_bounded(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await gateway.store.conversations.create(ACME, {}, [user(gateway.platform.random.token_hex(500))])
    monkeypatch.setattr("stream_gw.responses.conversations.RESPONSE_HISTORY_BYTES_MAX", 300)
    with pytest.raises(HistoryTooLong):
        await gateway.store.history(ACME, None, made.id)


async def test_conversations_fill_the_database_only_up_to_the_tenants_bound(open_gateway: Opener) -> None:
    gateway = await open_gateway(policy=StorePolicy(stored_bytes_max=2000))
    conversations, rows = gateway.store.conversations, gateway.rows
    assert rows is not None
    noise = gateway.platform.random.token_hex
    made = await conversations.create(ACME, {}, [user(noise(500))])
    held = await rows.bytes(ACME)
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: conversations.add(ACME, made.id, [user(noise(1000))]),
        lambda: conversations.create(ACME, {}, [user(noise(1000))]),
        lambda: conversations.change(ACME, made.id, {str(key): noise(250) for key in range(4)}),
    ]
    for call in calls:
        with pytest.raises(ResponseStorageFull) as raised:
            await call()
        assert (raised.value.http_status, await rows.bytes(ACME)) == (429, held), "nothing of it is kept"
    assert len((await conversations.items(ACME, made.id)).data) == 1
    await conversations.change(ACME, made.id, {"a": noise(50)})
    await conversations.change(ACME, made.id, {})
    assert await rows.bytes(ACME) == held
    with pytest.raises(ResponseStorageFull):
        for _ in range(20):
            await conversations.create(ACME, {}, [])  # one without items takes a row, too
    await conversations.create(GLOBEX, {}, [user(noise(500))])
    await conversations.delete(ACME, made.id)
    await conversations.create(ACME, {}, [])


async def test_items_count_as_they_are_and_not_as_they_are_packed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few KiB in the database could stand for gigabytes in the gateway's memory."""
    conversations = gateway.store.conversations
    made = await conversations.create(ACME, {}, [user("x" * 1000 + str(number)) for number in range(6)])
    monkeypatch.setattr("stream_gw.responses.conversations.RESPONSE_HISTORY_BYTES_MAX", 3000)
    with pytest.raises(HistoryTooLong):
        await gateway.store.history(ACME, None, made.id)
    await conversations.add(ACME, made.id, [window_item(gateway), user("after")])
    history = await gateway.store.history(ACME, None, made.id)
    assert texts(history[-1:]) == ["after"], "the window stands for all before it"


@pytest.mark.parametrize("text", [lambda gateway: "x" * 1000, lambda gateway: gateway.platform.random.token_hex(500)])
async def test_a_page_of_large_items_ends_early(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, text: Callable[[Gateway], str]
) -> None:
    conversations = gateway.store.conversations
    made = await conversations.create(ACME, {}, [user(text(gateway)) for _ in range(7)])
    monkeypatch.setattr("stream_gw.responses.conversations.RESPONSE_HISTORY_BYTES_MAX", 1500)
    found: list[Item] = []
    pages = 0
    has_more = True
    while has_more:
        page = await conversations.items(ACME, made.id, found[-1]["id"] if found else None, 100, "asc")
        found, has_more, pages = found + page.data, page.has_more, pages + 1
        assert 1 <= len(page.data) <= 2
    assert len({item["id"] for item in found}) == 7 and pages == 4
    monkeypatch.setattr("stream_gw.responses.conversations.RESPONSE_HISTORY_BYTES_MAX", 10)
    assert len((await conversations.items(ACME, made.id)).data) == 1, "never an empty page that has more"


async def test_conversations_expire_after_their_last_change(platform: Platform, gateway: Gateway) -> None:
    conversations, rows = gateway.store.conversations, gateway.rows
    assert rows is not None
    old, changed = [await conversations.create(ACME, {}, [user("m")]) for _ in range(2)]
    for made in (old, changed):
        row = await rows.conversation(ACME, made.id)
        assert row is not None
        await rows.change_conversation(row._replace(expires_at=row.created_at + 0.001), 0)
    with pytest.raises(ConversationNotFound):
        await conversations.read(ACME, old.id)
    row = row._replace(expires_at=row.created_at + 1000)
    await rows.change_conversation(row, 0)
    await conversations.change(ACME, changed.id, {"c": "d"})
    assert await rows.sweep() == 1
    assert (await conversations.read(ACME, changed.id)).metadata == {"c": "d"}
    assert await rows.items(ACME, old.id) == []


async def test_rows_of_a_deleted_tenant_are_swept(platform: Platform, gateway: Gateway) -> None:
    from sqlalchemy import insert

    from stream_gw.tenancy.sql import tables

    assert gateway.rows is not None and gateway.database is not None
    await gateway.store.conversations.create(ACME, {}, [user("m")])
    response = await gateway.stored()
    other = await gateway.stored(GLOBEX)
    await eventually(lambda: gateway.is_saved(response))
    await eventually(lambda: gateway.is_saved(other, GLOBEX))
    async with gateway.database.transaction() as connection:
        await connection.execute(
            insert(tables.tenants).values(
                id=ACME, label="", plan="default", suspended=False, prices={}, created_at=0, created_by="x",
                deleted_at=1.0, revision=2,
            )
        )  # fmt: skip
    assert await gateway.rows.sweep() == 2
    assert await gateway.rows.find(ACME, response) is None and await gateway.rows.bytes(ACME) == 0
    assert await gateway.rows.find(GLOBEX, StreamId(other)) is not None


async def test_a_text_that_the_database_cannot_store_is_the_callers_mistake(gateway: Gateway) -> None:
    """PostgreSQL has no NUL in texts. The database answered, so the caller must not be told to come back."""
    conversations = gateway.store.conversations
    made = await conversations.create(ACME, {"a": "b\0", "c\0": "d"}, [user("Hi\0")])
    assert (await conversations.read(ACME, made.id)).metadata == {"a": "b\0", "c\0": "d"}
    assert texts(await gateway.store.history(ACME, None, made.id)) == ["Hi\0"]
    asked: list[Callable[[], Awaitable[Any]]] = [
        lambda: conversations.item(ACME, made.id, "msg_\0"),
        lambda: conversations.delete_item(ACME, made.id, "msg_\0"),
        lambda: conversations.items(ACME, made.id, after="msg_\0"),
    ]
    for call in asked:
        with pytest.raises((BadRequest, ItemNotFound)):
            await call()
    with contextlib.suppress(BadRequest):
        await conversations.create(ACME, {}, [], "ann\0")
