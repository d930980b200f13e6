"""The WebSocket of ``WebSocketChatTransport``: the frames of the AI SDK's protocol, as a gateway answers them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from tests.gateway.processes import Running, delete_log
from tests.gateway.reference.socket_schema import assert_message
from tests.gateway.test_ui_chat import PATH, QUESTION, chunks_of, new_chat, text_of, turn
from tests.gateway.wire import MODEL, Gate

PROTOCOL = "ai-sdk.chat.v1"
RECEIVE_S = 20.0


class ChatSocket:
    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, type_: str, request: str, chat: str | None = None, **more: Any) -> None:
        named = {} if chat is None else {"id": chat, "headers": {}, "body": {}}
        frame = {"type": type_, "requestId": request, **named, **more}
        assert_message(f"chat.{type_}", frame)
        await self.connection.send(json.dumps(frame))

    async def ask(self, request: str, chat: str, tokens: int = 30, **body: Any) -> None:
        made = {"model": MODEL, "maxOutputTokens": tokens, "seed": 1, "ignore_eos": True, **body}
        await self.send("send", request, chat, trigger="submit-message", messages=[QUESTION], body=made)

    async def receive(self) -> dict[str, Any]:
        async with asyncio.timeout(RECEIVE_S):
            told: dict[str, Any] = json.loads(await self.connection.recv())
        assert_message(f"chat.{told['type']}", told)
        return told

    async def chunks(self, request: str, count: int = 1 << 30) -> list[dict[str, Any]]:
        """The chunks of a request from the first one on, to its end or so many; each with the number after the last."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            told = await self.receive()
            assert told["requestId"] == request, told
            if told["type"] == "end":
                break
            if told["type"] != "start":
                assert told["type"] == "chunk" and told["sequence"] == len(found), told
                found.append(told["chunk"])
        return found

    async def closed(self) -> tuple[int, str]:
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                await self.receive()
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code, closed.value.rcvd.reason


@asynccontextmanager
async def opened(
    gate: Gate, offered: Sequence[str] = (), headers: dict[str, str] | None = None
) -> AsyncIterator[ChatSocket]:
    headers = {"Authorization": f"Bearer {gate.key}"} if headers is None else headers
    names = [Subprotocol(name) for name in offered] or None
    url = f"ws://{gate.host}:{gate.port}{PATH}"
    async with connect(url, additional_headers=headers, subprotocols=names, proxy=None, close_timeout=2) as connection:
        yield ChatSocket(connection)


def stream_of(chunks: list[dict[str, Any]]) -> str:
    found: str = chunks[0]["messageMetadata"]["streamId"]
    return found


async def test_an_answer_has_the_chunks_of_the_same_request_over_http(one: Gate, two: Gate) -> None:
    posted = chunks_of((await two.ask("POST", PATH, turn(new_chat()))).body)
    async with opened(one, [PROTOCOL, f"bearer.{one.key}"], {}) as socket:
        assert socket.connection.subprotocol == PROTOCOL
        await socket.ask("r1", new_chat())
        chunks = await socket.chunks("r1")
    assert [chunk["type"] for chunk in chunks] == [chunk["type"] for chunk in posted]
    assert chunks[1:] == posted[1:]


async def test_a_frame_can_carry_the_credential(one: Gate) -> None:
    async with opened(one, headers={}) as socket:
        chat = new_chat()
        await socket.send("resume", "r1", chat, headers={"Authorization": f"Bearer {one.key}"})
        assert await socket.receive() == {"type": "no-active", "requestId": "r1"}
        await socket.send("resume", "r2", chat)
        assert await socket.receive() == {"type": "no-active", "requestId": "r2"}
        await socket.send("resume", "r3", chat, headers={"Authorization": "Bearer sk-nobody"})
        told = await socket.receive()
        assert (told["type"], told["code"]) == ("error", "invalid_api_key") and told["errorText"]


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ({"type": "resume", "requestId": "r", "id": "c"}, 4401),
        ({"type": "resume", "requestId": "r", "id": "c", "headers": {"x-api-key": "sk-nobody"}}, 4401),
        ({"type": "hello"}, 1008),
        ({"type": "\N{GRINNING FACE}" * 100}, 1008),
        ({"type": "resume", "id": "c"}, 1008),
        ({"type": "abort", "requestId": "r" * 200}, 1008),
    ],
)
async def test_a_socket_ends_at_what_has_no_answer(one: Gate, frame: dict[str, Any], code: int) -> None:
    async with opened(one, headers={}) as socket:
        await socket.connection.send(json.dumps(frame))
        closed, reason = await socket.closed()
        assert closed == code and reason and len(reason.encode()) <= 123


async def test_a_running_answer_is_replayed_on_another_gateway_and_outlives_its_socket(one: Gate, two: Gate) -> None:
    chat = new_chat()
    async with opened(one) as socket:
        await socket.ask("r1", chat, 200)
        begun = await socket.chunks("r1", 20)
    async with opened(two) as socket:
        await socket.send("resume", "r1", chat)
        assert await socket.receive() == {"type": "start", "requestId": "r1"}
        chunks = await socket.chunks("r1")
    assert chunks[0] == begun[0] and text_of(chunks).startswith(text_of(begun))
    assert chunks[-1]["messageMetadata"]["usage"]["outputTokens"] == 200
    assert (await two.info(stream_of(chunks)))["status"] == "completed"


async def test_two_chats_share_a_socket(one: Gate) -> None:
    async with opened(one) as socket:
        for request in ("a", "b"):
            await socket.ask(request, new_chat(), 20)
        texts, ended = {"a": "", "b": ""}, 0
        while ended < 2:
            told = await socket.receive()
            ended += told["type"] == "end"
            if told["type"] == "chunk" and told["chunk"]["type"] == "text-delta":
                texts[told["requestId"]] += told["chunk"]["delta"]
        assert texts["a"] == texts["b"] and texts["a"]


async def test_a_chat_whose_frames_are_lost_leaves_the_other_chats_alone(platform: Running, one: Gate) -> None:
    lost = new_chat()
    async with opened(one) as socket:
        await socket.ask("r1", lost, 5)
        await delete_log(platform, stream_of(await socket.chunks("r1")))
        await socket.ask("other", new_chat(), 100_000)
        other = stream_of(await socket.chunks("other", 3))
        await socket.send("resume", "r2", lost)
        while (told := await socket.receive())["requestId"] != "r2" or told["type"] == "start":
            pass
        assert (told["type"], told["code"]) == ("error", "stream_lost")
        while (await socket.receive())["type"] != "chunk":
            pass
    await one.cancel(other)


async def test_an_abort_cancels_and_leaves_nothing_to_resume(one: Gate, two: Gate) -> None:
    chat = new_chat()
    async with opened(one) as socket:
        await socket.ask("r1", chat, 5000)
        stream = stream_of(await socket.chunks("r1", 10))
        await socket.send("abort", "r1")
        await two.until_status(stream, "cancelled")
        await socket.send("resume", "r2", chat)
        told = await socket.receive()
        while told["requestId"] == "r1":  # sent before the abort came
            told = await socket.receive()
        assert told == {"type": "no-active", "requestId": "r2"}


async def test_an_abort_of_a_request_that_is_being_opened_cancels_it(one: Gate, two: Gate) -> None:
    chat, key = new_chat(), {"Idempotency-Key": new_chat()}
    made = turn(chat, 5000)
    body = {name: value for name, value in made.items() if name not in ("id", "messages", "trigger")}
    async with opened(one) as socket:
        frame = {"trigger": made["trigger"], "messages": made["messages"], "body": body, "headers": key}
        await socket.send("send", "r1", chat, **frame)
        await socket.send("abort", "r1")
        async with two.open("POST", PATH, made, key) as attached:  # waits for the stream of the same key
            await attached.rest()
    await two.until_status(attached.headers["x-stream-id"], "cancelled")


async def test_nothing_is_sent_for_an_aborted_request(one: Gate) -> None:
    """Also where it is aborted before it was found that there is nothing to resume.

    The gateway stands still while the frames are sent, so that it reads each abort before it can answer.
    """
    async with opened(one) as socket:
        os.kill(one.pid, signal.SIGSTOP)
        try:
            for request in ("r1", "r2", "r3"):
                await socket.send("resume", request, new_chat())
                await socket.send("abort", request)
            await socket.send("resume", "r4", new_chat())
        finally:
            os.kill(one.pid, signal.SIGCONT)
        assert await socket.receive() == {"type": "no-active", "requestId": "r4"}


async def test_a_page_that_resumes_again_keeps_its_answer(one: Gate, two: Gate) -> None:
    chat = new_chat()
    async with opened(one) as socket:
        await socket.ask("r1", chat, 150)
        stream = stream_of(await socket.chunks("r1", 10))
    async with opened(two) as socket:
        for request in ("a", "b"):
            await socket.send("resume", request, chat)
            if request == "a":
                await socket.chunks("a", 3)
                await socket.send("abort", "a")
        while (told := await socket.receive())["type"] != "end":
            pass
        assert told["requestId"] == "b"
    assert (await one.info(stream))["status"] == "completed"


async def test_a_page_that_resumes_on_another_socket_keeps_its_answer(one: Gate, two: Gate) -> None:
    """A page that is left aborts its resume, and its socket closes."""
    chat = new_chat()
    async with opened(one) as socket:
        await socket.ask("r1", chat, 100_000)
        stream = stream_of(await socket.chunks("r1", 10))
    async with opened(two) as socket:
        await socket.send("resume", "a", chat)
        await socket.chunks("a", 3)
        await socket.send("abort", "a")
    left = time.monotonic()
    async with opened(two) as socket:
        await socket.send("resume", "b", chat)
        while time.monotonic() < left + 1.5:  # longer than an aborted resume waits for another one
            assert (await socket.receive())["type"] in ("start", "chunk")
    assert (await one.info(stream))["status"] == "live"
    await one.cancel(stream)


async def test_an_abort_of_a_resume_alone_cancels(one: Gate, two: Gate) -> None:
    chat = new_chat()
    async with opened(one) as socket:
        await socket.ask("r1", chat, 5000)
        stream = stream_of(await socket.chunks("r1", 10))
    async with opened(two) as socket:
        await socket.send("resume", "a", chat)
        await socket.chunks("a", 3)
        await socket.send("abort", "a")
        await one.until_status(stream, "cancelled")


async def test_refusals_name_the_request(one: Gate) -> None:
    async with opened(one) as socket:
        await socket.ask("r1", new_chat(), temperature=9)
        told = await socket.receive()
        assert told["requestId"] == "r1" and "temperature must be 0 to 2" in told["errorText"]
        await socket.send("resume", "r2", new_chat(), lastSequence=4)
        assert "lastSequence" in (await socket.receive())["errorText"]
        await socket.send("resume", "r3", "")
        assert "id of a chat" in (await socket.receive())["errorText"]
        await socket.send("resume", "r4", "c", body={"user": 5})
        assert "user must be a string" in (await socket.receive())["errorText"]
        many = {f"x-{number}": "" for number in range(4000)}
        await socket.send("resume", "r5", "c", headers=many)
        assert "headers of a frame" in (await socket.receive())["errorText"], "they are read on the event loop"
        await socket.send("resume", "r6", "c", body=many)
        assert "more than" in (await socket.receive())["errorText"]
        await socket.ask("same", new_chat(), 5000)
        await socket.chunks("same", 3)
        await socket.ask("same", new_chat())
        while (told := await socket.receive())["type"] == "chunk":
            pass
        assert "is running" in told["errorText"]
        await socket.send("abort", "same")
