"""The gateway's loop goes on while large responses are stored and read."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from stream_gw.responses import Item
from stream_gw.responses.records import stored_items
from tests.responses.conftest import ACME, Gateway, Platform
from tests.support.turns import cpu_s, longest_turn_s
from tests.support.waiting import eventually

THOUGHTS: list[Item] = [{"type": "reasoning", "summary": []} for _ in range(20_000)]
"""Items that no prompt has, so that a request may hold more of them than messages."""


async def test_a_request_of_many_items_is_stored(platform: Platform, gateway: Gateway) -> None:
    longest = await longest_turn_s(lambda: gateway.store.begun(ACME, platform.response(input=THOUGHTS)))
    assert longest < cpu_s(lambda: msgspec.json.encode(stored_items(THOUGHTS, "x"))) / 2


async def test_many_items_are_added_to_a_conversation(platform: Platform, gateway: Gateway) -> None:
    made = await gateway.store.conversations.create(ACME, {}, [])
    record = platform.response(input=THOUGHTS, conversation=made.id)
    assert await gateway.store.begun(ACME, record)
    await platform.create(record)
    await platform.end(record)
    longest = await longest_turn_s(lambda: gateway.records.prepare(ACME, record.id))
    packed = cpu_s(lambda: [zlib.compress(msgspec.json.encode(item), 1) for item in stored_items(THOUGHTS, "x")])
    assert longest < packed / 2


@pytest.mark.parametrize("saved", [False, True])
async def test_what_is_packed_tightly_is_read(gateway: Gateway, saved: bool) -> None:
    """Repeated text takes a thousandth of its bytes in the database."""
    input_: list[Item] = [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 40_000}]
    response = await gateway.stored(input=input_)
    if saved:
        await eventually(lambda: gateway.is_saved(response))
        await gateway.leaves_redis(response)
    else:
        assert await gateway.store.read(ACME, response)
    encoded = msgspec.json.encode(input_)
    assert len(zlib.compress(encoded, 1)) < 16 << 10
    longest = await longest_turn_s(lambda: gateway.store.read(ACME, response))
    assert longest < cpu_s(lambda: msgspec.json.decode(encoded)) / 2
