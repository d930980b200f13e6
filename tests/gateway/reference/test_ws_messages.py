"""Any messages on a WebSocket: each socket goes on or is closed with a reason, and no other tenant's data comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed

from tests.gateway.reference.fleet import Fleet, api_fleet
from tests.gateway.wire import MODEL, Tokenstream, chat

pytestmark = [pytest.mark.platform, pytest.mark.timeout(240)]
EXAMPLES = 150
ANSWER_S = 10.0
CLOSE_CODES = {1008, 1009, 4401, 4429}
"""Close codes for what a client did wrong; 1011 would be the gateway's own fault."""
OWN, THEIRS, NEVER = "<own>", "<theirs>", "resp_" + "0" * 32
"""``OWN`` and ``THEIRS`` stand for streams that exist; so do ``<own key>`` and ``<their key>`` for API keys."""
HOSTILE = [
    b"", b"{", b"[]", b"null", b"\xef\xbb\xbf{}", b'{"t":"pong","t":"auth"}', b'{"t":"sub","ch":1e400}',
    b'{"t":"cancel","id":"\\ud800","stream":"\\udfff"}',
    b'{"t":"input","id":"i","stream":"<own>","item":{"\\ud800":1}}',
    b'{"t":"create","ch":1,"body":' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"t":"input","item":' + b'{"a":' * 5000,
    b'{"t":"create","ch":1,"dialect":"openai.chat","body":{"model":"\\ud800"}}', b'{"t":1}', b'{"t":"sub","ch":-1}',
]  # fmt: skip

any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
channels = st.sampled_from([0, 1, 2, -1, 2**31, 2**70]) | st.integers(0, 5)
streams = st.sampled_from([OWN, OWN, THEIRS, NEVER, "", "resp_", "x" * 5000, OWN + "\n", "..", "\x00"])
bodies = st.builds(lambda body, more: body | more, st.just(chat(3)), st.dictionaries(
    st.sampled_from(["model", "messages", "n", "stream", "user", "session_id", "deadline_s", "stop", "logprobs"]),
    st.sampled_from([MODEL, 1, 2, "", None, "\ud800", []]) | any_json, max_size=2))  # fmt: skip
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "ch": channels,
    "stream": streams,
    "after": st.sampled_from(["1-0", "1-2", "1-900", "0-0", "2-0", "x", "", "1-" + "9" * 30]),
    "dialect": st.sampled_from(["openai.chat", "openai.completions", "", "openai.embeddings"]),
    "mode": st.sampled_from(["tokens", "coalesce", "snapshot", ""]),
    "id": st.text(max_size=300) | st.sampled_from(["", "k", "\x00"]),
    "item": st.dictionaries(st.text(max_size=8), any_json, max_size=3),
    "body": bodies,
    "key": st.none() | st.sampled_from(["a", "", "k" * 300, "\x00", "é"]),
    "queued": st.booleans(),
    "token": st.sampled_from(["", "cap_x.y.z", "<own key>", "<their key>", "é" * 5000]),
    "traceparent": st.sampled_from(["", "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "\x00"]),
}
NEEDED = {
    "auth": ("token",), "create": ("ch", "body"), "sub": ("ch", "stream"), "unsub": ("ch",),
    "cancel": ("id", "stream"), "input": ("id", "stream", "item"), "pong": (),
}  # fmt: skip


@st.composite
def near_valid(draw: st.DrawFn) -> bytes:
    """A message with the fields of its kind and some others, of which at most one has any value."""
    kind = draw(st.sampled_from(sorted(NEEDED)))
    names = dict.fromkeys((*NEEDED[kind], *draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3))))
    message: dict[str, Any] = {"t": kind} | {name: draw(FIELDS[name]) for name in names}
    if draw(st.integers(0, 3)) == 0:
        message[draw(st.sampled_from(sorted(message)))] = draw(any_json)
    return json.dumps(message).encode()


messages = near_valid() | st.sampled_from(HOSTILE) | any_json.map(lambda value: json.dumps(value).encode())


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("ws")
    with api_fleet(folder) as started:  # its end fails where a process logged a traceback
        yield started


@pytest.fixture(scope="module")
def known(fleet: Fleet) -> dict[str, str]:
    """Streams and keys by the words that stand for them."""

    async def create() -> dict[str, str]:
        own, _ = await fleet.acme.finished(20)
        theirs, _ = await fleet.globex.finished(20)
        return {OWN: own, THEIRS: theirs, "<own key>": fleet.acme.key, "<their key>": fleet.globex.key}

    return asyncio.run(create())


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(sent=st.lists(messages, min_size=1, max_size=7), signed_in=st.sampled_from([True, True, True, False]))
def test_any_messages(fleet: Fleet, known: dict[str, str], sent: list[bytes], signed_in: bool) -> None:
    texts = []
    for raw in sent:
        text = raw.decode()
        for word, value in known.items():
            text = text.replace(word, value)
        texts.append(text)
    asyncio.run(exchange(fleet, known, texts, signed_in))


async def exchange(fleet: Fleet, known: dict[str, str], texts: list[str], signed_in: bool) -> None:
    async with fleet.acme.socket(None if signed_in else {}, close_timeout=5) as socket:
        with suppress(ConnectionClosed):
            for text in texts:
                await socket.connection.send(text)
            await socket.send("cancel", id="last", stream=known[OWN])
            await answered(socket, "last")
        assert socket.connection.close_code in (None, *CLOSE_CODES), texts
        is_theirs = not signed_in and any(known["<their key>"] in text for text in texts)
        if not is_theirs:
            assert_nothing_of(known[THEIRS], socket)
    async with fleet.acme.socket() as socket:
        await socket.sub(1, known[OWN])
        await socket.until_ended(1, within_s=ANSWER_S)
        await socket.send("cancel", id="after", stream=known[OWN])
        await answered(socket, "after")


async def answered(socket: Tokenstream, id: str) -> None:
    await socket.until(lambda message: message["t"] in ("ack", "error") and message.get("id") == id, ANSWER_S)


def assert_nothing_of(stream: str, socket: Tokenstream) -> None:
    """Nothing but an error, which repeats what the client sent, names the stream."""
    digits = stream.removeprefix("resp_")
    received = [message for track in socket.tracks.values() for message in (*track.ok, *track.data, track.end)]
    received += [message for message in socket.others if message["t"] != "error"]
    assert digits not in json.dumps(received)
