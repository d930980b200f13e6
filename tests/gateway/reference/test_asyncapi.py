"""The AsyncAPI document: the official schema accepts it, and every message on a real socket fits it."""

from __future__ import annotations

import inspect
import json
import re
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stream_fabric.errors import Draining
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.reader import Gap, Reset
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.transport import ws, ws_messages, ws_socket
from stream_gw.transport.ws_socket import Channel, Socket
from tests.gateway.reference.socket_schema import assert_fits, document, fits, tags
from tests.gateway.reference.test_document import references
from tests.gateway.reference.test_ws_messages import near_valid
from tests.gateway.test_ws import PROTOCOL, UNKNOWN, Wire
from tests.gateway.wire import Gate, Tokenstream, chat
from tests.house.tree import ROOT
from tests.support.missing import missing

SPECS = ROOT / "tests" / "node" / "node_modules" / "@asyncapi" / "specs" / "schemas"


@pytest.fixture(scope="module")
def official() -> jsonschema_rs.Draft7Validator:
    """The schema that the AsyncAPI initiative publishes for the document's version."""
    path: Path = SPECS / f"{document()['asyncapi']}.json"
    if not path.exists():
        missing("needs the packages of tests/node; run: make node")
    return jsonschema_rs.Draft7Validator(json.loads(path.read_text()))


@pytest.mark.platform
def test_the_official_schema_accepts_the_document(official: jsonschema_rs.Draft7Validator) -> None:
    official.validate(document())
    broken = document() | {"operations": {"x": {"action": "shout"}}}
    assert not official.is_valid(broken)


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    found = set(references(document()))
    for reference in found:
        part: Any = document()
        for name in reference.removeprefix("#/").split("/"):
            part = part[name]
    assert {f"#/components/schemas/{name}" for name in document()["components"]["schemas"]} <= found


def test_every_message_in_the_code_is_in_the_document() -> None:
    built = {tag for module in (ws, ws_socket) for tag in re.findall(r'"t":\s*"(\w+)"', inspect.getsource(module))}
    assert built == tags("send")
    assert {str(struct.__struct_config__.tag) for struct in ws_messages.ClientMessage.__args__} == tags("receive")


async def test_it_is_served_beside_the_openapi_document(one: Gate) -> None:
    no_key = {"authorization": ""}
    reply = await one.ask("GET", "/asyncapi.json", headers=no_key)
    assert reply.status == 200 and reply.json == document()
    again = await one.ask("GET", "/asyncapi.json", headers=no_key | {"if-none-match": reply.headers["etag"]})
    assert again.status == 304
    openapi = await one.ask("GET", "/openapi.json", headers=no_key)
    assert openapi.json["x-websocket"]["document"] == "/asyncapi.json"
    assert b'href="/asyncapi.json"' in (await one.ask("GET", "/docs", headers=no_key)).body


async def test_a_real_session_fits_the_document(one: Gate, two: Gate) -> None:
    """``Tokenstream`` checks each message that comes; here those that are sent are checked too."""
    sent: set[str] = set()
    key = one.key

    async def send(socket: Tokenstream, t: str, **fields: Any) -> None:
        assert_fits({"t": t, **fields})
        sent.add(t)
        await socket.send(t, **fields)

    running = await one.background(2000)
    async with one.socket({"authorization": ""}, subprotocols=[PROTOCOL]) as socket:
        await send(socket, "auth", token=key)
        await socket.until_t("hi")
        await send(socket, "create", ch=1, dialect="openai.chat", body=chat(20), key=f"k{time.time_ns()}", queued=True)
        text = {"model": "sim-small", "prompt": "Rivers", "max_tokens": 5}
        await send(socket, "create", ch=2, dialect="openai.completions", body=text)
        message = {"model": "sim-small", "max_tokens": 5, "messages": [{"role": "user", "content": "Rivers"}]}
        await send(socket, "create", ch=3, dialect="anthropic.messages", body=message)
        await socket.until_ended(1, 2, 3)
        for ch, mode in enumerate(("tokens", "coalesce", "snapshot"), 4):
            await send(socket, "sub", ch=ch, stream=running, mode=mode)
            await socket.until_t("d", ch=ch)
        await send(socket, "unsub", ch=4)
        await send(socket, "input", id="i", stream=running, item={"role": "user", "content": "Shorter."})
        await socket.until_t("ack", id="i")
        await send(socket, "input", id="i", stream=running, item={"role": "user", "content": "Shorter."})
        assert (await socket.until_t("ack", id="i"))["result"] == "duplicate"
        await send(socket, "pong")
        for stream in (running, running, UNKNOWN, socket.track(1).ok[0]["stream"]):
            await send(socket, "cancel", id="c", stream=stream)
            await socket.until_t("ack", id="c")
        await socket.until_ended(5, 6)
        await send(socket, "sub", ch=9, stream=UNKNOWN)
        await socket.until_t("error", ch=9)
        await send(socket, "input", id="j", stream=UNKNOWN, item={})
        await socket.until_t("error", id="j")
        await socket.send("nonsense")
        await socket.until_t("error")
    assert sent == tags("receive")


def test_messages_that_a_session_seldom_sees_fit_the_document() -> None:
    wire = Wire()
    socket = Socket(wire, "conn", time.monotonic, BodyBytes())  # type: ignore[arg-type]
    channel = socket.channels[7] = Channel(socket, 7)
    channel.reports_queue = True
    channel.set_stream(UNKNOWN, None, 0)
    channel.queued(3, 17, 12.4)
    channel.open("1.aa", 0, "live")
    channel.gap(Gap(1, 5))
    channel.reset(Reset(Epoch(2, "bb"), 3))
    channel.epoch_changed("2.bb", 3)
    channel.fail(Draining("this gateway is shutting down"), Cursor(2, 3))
    kinds = [message["t"] for message in wire.sent]
    assert kinds == ["ok", "queued", "gap", "reset", "ok", "error"]
    for message in wire.sent:
        assert_fits(message)


@settings(max_examples=300, deadline=None)
@given(raw=near_valid() | st.binary(max_size=20))
def test_a_message_that_fits_the_document_is_understood(raw: bytes) -> None:
    try:
        message = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        assume(False)
    assume(isinstance(message, dict) and message.get("t") in [*tags("receive")])
    assume(not isinstance(message.get("ch"), float))  # JSON Schema takes 1.0 for an integer
    if fits(message):
        ws_messages.decoder.decode(raw)
    else:
        with pytest.raises(msgspec.ValidationError):
            decoded = ws_messages.decoder.decode(raw)
            # The decoder leaves dialects, bodies, items and the range of a channel to the code that uses them
            if isinstance(decoded, ws_messages.Create | ws_messages.Sub | ws_messages.Input):
                raise msgspec.ValidationError
