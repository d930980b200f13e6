"""Requests for summaries, on a gateway in the test's process."""

from __future__ import annotations

import msgspec

from stream_fabric.errors import ModelNotFound
from stream_fabric.redis.client import RedisClient
from stream_gw.delivery.collected import CollectingOutlet
from stream_gw.dialects.requests import parse_create
from stream_gw.responses import Item, summary_request
from stream_gw.streams.context.asides import Asides
from stream_gw.streams.context.summary import summarised
from tests.gateway.in_process import WHO, in_process
from tests.support.turns import cpu_s, longest_turn_s

ITEMS: list[Item] = [{"role": "user", "content": "Tell me of rivers."}] * 40_000


async def test_many_items_are_summarised_beside_the_loop(redis_client: RedisClient) -> None:
    """``/v1/responses/compact`` of 44,000 items held the loop for 0.1 s."""
    size = len(msgspec.json.encode(ITEMS))
    async with in_process(redis_client) as made:
        asides = Asides(made.gateway, WHO, "req", lambda opened: CollectingOutlet(opened.facts))

        async def refused() -> bool:
            try:
                await summarised(asides, "absent", None, ITEMS, size)
            except ModelNotFound:
                return True
            return False

        longest = await longest_turn_s(refused)
    text = cpu_s(lambda: parse_create(summary_request("absent", None, ITEMS), "chat"))
    assert longest < text / 2
