"""Streams that have ended here: how long their frames are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from inference.agent.streams import Streams
from stream_fabric.limits import ENDED_KEPT_S, UNCHECKED_KEPT_S
from stream_fabric.stream.frames import Open
from stream_fabric.stream.ids import StreamId
from stream_fabric.stream.log import AppendCode, AppendReply
from tests.agent.test_lease import stream
from tests.support.virtual import on_virtual_time


class Silent:
    """A part that is only told things."""

    def __getattr__(self, name: str) -> Callable[..., float]:
        return lambda *args, **fields: 0.0


@on_virtual_time
async def test_a_kept_stream_that_shrinks_leaves_no_bytes_behind() -> None:
    """After a failover that lost its end a stream may be cancelled before it can append the end again."""
    silent: Any = Silent()
    running = {StreamId(f"s{n}"): stream(f"s{n}") for n in range(3)}
    streams, kept = Streams(running, silent, silent, silent), list(running.values())
    for each in kept:
        each.frame(Open(0, 0, "text"))
        each.end("completed")
        streams.remove(each, keep=True)
        each.producer.append_to_send(1 << 20, 1 << 30)
        each.producer.receive_reply(AppendReply(AppendCode.CANCELLED, 0))
    assert streams.ended() == kept
    streams.note_checked(kept)
    await asyncio.sleep(ENDED_KEPT_S + 1)
    streams.drop_expired()
    assert not streams.ended() and streams._ended_bytes == 0


@on_virtual_time
async def test_a_stream_that_could_not_be_checked_is_kept_until_the_log_may_have_dropped_it() -> None:
    """The log keeps an expired or deleted stream no longer than that: a later repair would bring it back."""
    silent: Any = Silent()
    one = stream("s")
    streams = Streams({StreamId("s"): one}, silent, silent, silent)
    one.frame(Open(0, 0, "text"))
    one.end("completed")
    streams.remove(one, keep=True)
    await asyncio.sleep(UNCHECKED_KEPT_S - 1)
    streams.drop_expired()
    assert streams.ended() == [one]
    await asyncio.sleep(2)
    streams.drop_expired()
    assert not streams.ended() and streams._ended_bytes == 0


@on_virtual_time
async def test_an_ended_stream_keeps_no_prompt_and_counts_what_it_keeps() -> None:
    """A replica may end hundreds of long prompts within the time for which it keeps their ends."""
    silent: Any = Silent()
    one = stream("s")
    one.work = msgspec.structs.replace(
        one.work, request=msgspec.structs.replace(one.work.request, body=msgspec.Raw(b'{"messages":[]}'))
    )
    one.prior = (b"{}" * 500,)
    streams = Streams({StreamId("s"): one}, silent, silent, silent)
    one.frame(Open(0, 0, "text"))
    one.end("completed")
    streams.remove(one, keep=True)
    assert bytes(one.work.request.body) == b"{}" and one.work.request.stream == "s"
    assert streams._ended_bytes == one.producer.bytes_held + 1000
