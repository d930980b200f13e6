"""The step socket: vLLM's plug-in in front of an ASGI application, and the agent's side, on a real Unix socket."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from inference.engines.plugin import stream_gw_steps as plugin
from inference.engines.plugin.stream_gw_steps import (
    ADDRESS,
    ASK,
    BODY,
    BROKEN,
    END,
    HEAD,
    HELLO,
    LEAVE,
    PIECE_BYTES_MAX,
    RECORD,
    VERSION,
    Records,
    Steps,
)
from inference.engines.upstream import steps
from inference.engines.upstream.answer import AnswerBroken
from inference.engines.upstream.steps import StepSocket
from stream_fabric.errors import EngineFailed
from tests.support.waiting import eventually

Serve = Callable[[dict[str, Any], Callable[..., Any], Callable[..., Any]], Awaitable[None]]
PATH = "/v1/chat/completions"


async def begin(send: Callable[..., Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", b"text/event-stream")]})


async def put(send: Callable[..., Any], body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def echo(*parts: bytes) -> Serve:
    async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        await begin(send)
        for part in parts:
            await put(send, part)
            await asyncio.sleep(0)
        await put(send, b"", more=False)

    return serve


@asynccontextmanager
async def server(serve: Serve, monkeypatch: pytest.MonkeyPatch, path: Path) -> AsyncIterator[Steps]:
    """An API server with the plug-in: the application knows its lifespan and requests."""

    async def application(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] == "http":
            await serve(scope, receive, send)

    monkeypatch.setenv(ADDRESS, str(path))
    monkeypatch.setattr(plugin, "_RETRY_S", 0.01)
    middleware = Steps(application)
    await middleware({"type": "lifespan", "app": "the app", "state": {"made": 1}}, None, None)
    try:
        yield middleware
    finally:
        assert middleware._connecting is not None
        middleware._connecting.cancel()


@pytest.fixture
async def socket(tmp_path: Path) -> AsyncIterator[StepSocket]:
    made = StepSocket(str(tmp_path / "steps"), {"authorization": "Bearer k"}, silence_s=20.0)
    starting = asyncio.create_task(made.start())
    await eventually(Path(made.path).exists)
    yield made
    await starting
    made.close()


async def ask(socket: StepSocket, body: bytes = b"{}", number: int = 0) -> bytes:
    with closing(await socket.post(PATH, {"x-request-id": str(number)}, body)) as answer:
        return await answer.read_start(1 << 26)


# --- records ----------------------------------------------------------------------------------------------------


def test_records_are_the_same_wherever_their_bytes_are_cut() -> None:
    draw = random.Random(3)
    sent = [(draw.randrange(1 << 32), draw.randrange(7), draw.randbytes(draw.randrange(60))) for _ in range(40)]
    whole = b"".join(RECORD.pack(len(payload), number, kind) + payload for number, kind, payload in sent)
    for pieces in (1, 2, 5, 50, len(whole)):
        cuts = [0, *sorted(draw.sample(range(1, len(whole)), pieces - 1)), len(whole)]
        records = Records()
        got = [record for a, b in itertools.pairwise(cuts) for record in records.receive(whole[a:b])]
        assert got == sent


def test_a_record_that_is_too_large_is_refused_by_its_head() -> None:
    with pytest.raises(ValueError, match="bytes"):
        Records().receive(RECORD.pack(1 << 30, 1, BODY))


# --- requests and answers ---------------------------------------------------------------------------------------


async def test_a_request_arrives_as_by_http(
    socket: StepSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        seen.append((scope, await receive()))
        await echo(b"data: 1\n\n", b"data: 2\n\n")(scope, receive, send)

    async with server(serve, monkeypatch, tmp_path / "steps"):
        await eventually(lambda: socket.connected)
        body = random.Random(1).randbytes(3_000_000)
        with closing(await socket.post(PATH, {"x-request-id": "r"}, body)) as answer:
            assert (answer.status, answer.headers) == (200, {"content-type": "text/event-stream"})
            assert await answer.read_start(1 << 20) == b"data: 1\n\ndata: 2\n\n"
    scope, message = seen[0]
    assert message == {"type": "http.request", "body": body, "more_body": False}
    assert (scope["type"], scope["method"], scope["path"], scope["app"]) == ("http", "POST", PATH, "the app")
    assert scope["headers"] == [(b"authorization", b"Bearer k"), (b"x-request-id", b"r")]
    assert scope["state"] == {"made": 1}


async def test_a_large_document_comes_whole(
    socket: StepSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = random.Random(2).randbytes(2 * PIECE_BYTES_MAX + 1)
    async with server(echo(document), monkeypatch, tmp_path / "steps"):
        await eventually(lambda: socket.connected)
        assert await ask(socket) == document


async def test_what_one_turn_makes_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty streams get a token in the same turn of the loop: one write, and one read finds all of them."""
    step = asyncio.Event()

    async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        await begin(send)
        await step.wait()
        await put(send, b"data: token\n\n")
        await receive()
        await receive()

    agent: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()
    listener = await asyncio.start_unix_server(lambda *pair: agent.set_result(pair), tmp_path / "steps")
    async with listener, server(serve, monkeypatch, tmp_path / "steps"):
        reader, writer = await agent
        records = Records()
        assert records.receive(await reader.read(1 << 20)) == [(0, HELLO, b"%d" % VERSION)]
        asked = json.dumps({"path": PATH, "headers": []}).encode() + b"\n{}"
        writer.write(b"".join(RECORD.pack(len(asked), number, ASK) + asked for number in range(1, 51)))
        heads: list[tuple[int, int, bytes]] = []
        while len(heads) < 50:
            heads += records.receive(await reader.read(1 << 20))
        assert {kind for _, kind, _ in heads} == {HEAD}
        step.set()
        message = records.receive(await reader.read(1 << 20))
        assert sorted(message) == [(number, BODY, b"data: token\n\n") for number in range(1, 51)]
        writer.close()


async def test_answers_side_by_side_do_not_mix(
    socket: StepSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        body = (await receive())["body"]
        await echo(*[body + b"%d " % part for part in range(20)])(scope, receive, send)

    async with server(serve, monkeypatch, tmp_path / "steps"):
        await eventually(lambda: socket.connected)
        answers = await asyncio.gather(*(ask(socket, b"%d:" % number) for number in range(30)))
    assert answers == [b"".join(b"%d:%d " % (number, part) for part in range(20)) for number in range(30)]


async def test_an_answer_that_is_left_is_told_as_a_closed_connection(
    socket: StepSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        await receive()
        await begin(send)
        heard.append((await receive())["type"])
        await put(send, b"for nobody")

    async with server(serve, monkeypatch, tmp_path / "steps"):
        await eventually(lambda: socket.connected)
        (await socket.post(PATH, {}, b"")).close()
        await eventually(lambda: heard == ["http.disconnect"])
        waiting = asyncio.create_task(socket.post(PATH, {}, b""))
        answer = await waiting
        reading = asyncio.create_task(answer.read_start(10))
        await asyncio.sleep(0)
        reading.cancel()
        answer.close()
        await eventually(lambda: len(heard) == 2)
        (link,) = socket._links
        assert link.load() == 0


async def test_a_server_that_goes_on_after_the_end_is_stopped(
    socket: StepSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has all it needs before the server has ended its answer: what still comes is answered by LEAVE."""
    heard: list[str] = []

    async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        await receive()
        await begin(send)
        gone = asyncio.create_task(receive())
        while not gone.done():
            await put(send, b"x")
            await asyncio.sleep(0.001)
        heard.append(gone.result()["type"])

    async with server(serve, monkeypatch, tmp_path / "steps"):
        await eventually(lambda: socket.connected)
        with closing(await socket.post(PATH, {}, b"")) as answer:
            assert await answer.read_start(3) == b"xxx"
        await eventually(lambda: heard == ["http.disconnect"])


@pytest.mark.parametrize("begun", [False, True])
async def test_an_application_that_fails_costs_its_request_only(
    begun: bool, socket: StepSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = asyncio.Event()

    async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if (await receive())["body"] == b"bad":
            if begun:
                await begin(send)
                await put(send, b"some")
            raise KeyError("no such thing")
        await begin(send)
        await go.wait()
        await put(send, b"good", more=False)

    async with server(serve, monkeypatch, tmp_path / "steps"):
        await eventually(lambda: socket.connected)
        good = asyncio.create_task(ask(socket))
        if begun:
            with pytest.raises(AnswerBroken, match="no such thing"):
                await ask(socket, b"bad")
        else:
            with closing(await socket.post(PATH, {}, b"bad")) as answer:
                assert (answer.status, await answer.read_start(100)) == (500, b"Internal Server Error")
        go.set()
        assert await good == b"good"


async def test_a_reader_that_raises_costs_its_answer_only(
    socket: StepSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = asyncio.Event()
    left: list[str] = []

    async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        number = (await receive())["body"].decode()
        await begin(send)
        await step.wait()
        await put(send, b"token")
        if number == "0":
            left.append((await receive())["type"])
        await put(send, b"", more=False)

    def receive(piece: bytes) -> bool:
        raise KeyError("mine")

    async with server(serve, monkeypatch, tmp_path / "steps"):
        await eventually(lambda: socket.connected)
        bad = await socket.post(PATH, {}, b"0")
        reading = asyncio.create_task(bad.deliver(receive))
        others = [asyncio.create_task(ask(socket, b"%d" % number)) for number in range(1, 5)]
        (link,) = socket._links
        await eventually(lambda: link.load() == 5)
        step.set()
        with pytest.raises(KeyError, match="mine"):
            await reading
        assert await asyncio.gather(*others) == [b"token"] * 4
        await eventually(lambda: left == ["http.disconnect"])
        bad.close()


async def test_a_path_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="--upstream-steps"):
        await StepSocket(str(tmp_path / "no" / "folder"), {}, silence_s=1.0).start()
    with pytest.raises(EngineFailed, match="--upstream-steps"):
        await StepSocket(str(tmp_path / ("x" * 120)), {}, silence_s=1.0).start()


async def test_a_plugin_that_does_not_connect_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(steps, "_FIRST_S", 0.05)
    socket = StepSocket(str(tmp_path / "steps"), {}, silence_s=1.0)
    await socket.start()
    assert "by HTTP until it does" in caplog.text
    assert not socket.connected
    socket.close()


# --- the connection ---------------------------------------------------------------------------------------------


async def test_a_lost_connection_fails_its_answers_and_comes_again(
    socket: StepSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        body = (await receive())["body"]
        await begin(send)
        if body == b"wait":
            heard.append((await receive())["type"])
        await put(send, b"done", more=False)

    async with server(serve, monkeypatch, tmp_path / "steps"):
        await eventually(lambda: socket.connected)
        reading = asyncio.create_task(ask(socket, b"wait"))
        (link,) = socket._links
        await eventually(lambda: link.load() == 1)
        link.close()
        with pytest.raises(AnswerBroken):
            await reading
        await eventually(lambda: heard == ["http.disconnect"])
        await eventually(lambda: socket.connected and link not in socket._links)
        assert await ask(socket) == b"done"


async def test_requests_are_spread_over_api_servers(
    socket: StepSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = asyncio.Event()
    served = [0, 0]

    def counting(which: int) -> Serve:
        async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
            served[which] += 1
            await begin(send)
            await go.wait()
            await put(send, b"", more=False)

        return serve

    path = tmp_path / "steps"
    async with server(counting(0), monkeypatch, path), server(counting(1), monkeypatch, path):
        await eventually(lambda: len(socket._links) == 2)
        asked = [asyncio.create_task(ask(socket)) for _ in range(10)]
        await eventually(lambda: sum(served) == 10)
        go.set()
        await asyncio.gather(*asked)
    assert served == [5, 5]
    await eventually(lambda: not socket.connected)
    with pytest.raises(AnswerBroken, match="not connected"):
        await ask(socket)


async def test_a_plugin_of_another_version_is_not_used(
    socket: StepSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "VERSION", VERSION + 1)
    async with server(echo(b"x"), monkeypatch, tmp_path / "steps"):
        await eventually(lambda: "another version" in caplog.text)
        assert not socket.connected


async def test_bytes_that_are_no_records_close_the_connection(socket: StepSocket, tmp_path: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(tmp_path / "steps")
    writer.write(RECORD.pack(1, 0, HELLO) + b"%d" % VERSION + b"\xff" * 20)
    assert await reader.read() == b""
    writer.close()
    await eventually(lambda: not socket.connected)


async def test_a_server_that_is_silent_fails_the_request_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        await receive()
        await begin(send)
        heard.append((await receive())["type"])

    socket = StepSocket(str(tmp_path / "steps"), {}, silence_s=0.05)
    async with server(serve, monkeypatch, tmp_path / "steps"):
        await socket.start()
        assert socket.connected
        with pytest.raises(TimeoutError, match="sent nothing for"):
            await ask(socket)
        await eventually(lambda: heard == ["http.disconnect"])
    socket.close()


async def test_an_agent_that_does_not_read_makes_the_application_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plug-in's memory is bounded by what a socket's buffers hold."""
    sent = 0

    async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        nonlocal sent
        await begin(send)
        while sent < 1 << 26:
            await put(send, b"x" * 10_000)
            sent += 10_000
            await asyncio.sleep(0)

    agent: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()
    listener = await asyncio.start_unix_server(lambda *pair: agent.set_result(pair), tmp_path / "steps", limit=1 << 16)
    async with listener, server(serve, monkeypatch, tmp_path / "steps"):
        _, writer = await agent
        asked = json.dumps({"path": PATH, "headers": []}).encode() + b"\n{}"
        writer.write(RECORD.pack(len(asked), 1, ASK) + asked)
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.2)
        assert 0 < sent < 4 << 20
        writer.close()


async def test_a_closed_socket_fails_what_is_being_read_and_leaves_no_file(
    socket: StepSocket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        await receive()
        await begin(send)
        await receive()

    async with server(serve, monkeypatch, tmp_path / "steps"):
        await eventually(lambda: socket.connected)
        reading = asyncio.create_task(ask(socket))
        (link,) = socket._links
        await eventually(lambda: link.load() == 1)
        socket.close()
        with pytest.raises(AnswerBroken):
            await reading
    assert not (tmp_path / "steps").exists()


def test_the_plugin_needs_nothing_but_python() -> None:
    """vLLM's environment has no stream-gw."""
    source = Path(plugin.__file__).read_text()
    imported = {
        line.split()[1].partition(".")[0] for line in source.splitlines() if line.startswith(("import", "from"))
    }
    assert imported <= {
        "__future__",
        "asyncio",
        "contextlib",
        "json",
        "logging",
        "os",
        "struct",
        "collections",
        "typing",
    }


def test_kinds_have_numbers_that_stay() -> None:
    assert (HELLO, ASK, LEAVE, HEAD, BODY, END, BROKEN) == (0, 1, 2, 3, 4, 5, 6)
