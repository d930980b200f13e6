"""The cookie for a browser's EventSource: it reads streams and grants nothing else."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

import pytest

from stream_fabric.limits import COOKIE_BYTES_MAX, SSE_RETRY_MS_MAX, SSE_RETRY_MS_MIN
from stream_gw.auth import COOKIE
from tests.gateway.conftest import Tenants
from tests.gateway.processes import Running
from tests.gateway.wire import HEARTBEAT, MODEL, Gate, Reply, after_heartbeat, chat, events, refusal
from tests.support.waiting import eventually

EVENT_STREAM = {"accept": "text/event-stream"}


async def mint(gate: Gate, **asked: Any) -> str:
    reply = await gate.ask("POST", "/v1/tokens", asked)
    assert reply.status == 200, reply
    token: str = reply.json["token"]
    return token


def bearer(token: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}", **more}


def cookie(token: str, **more: str) -> dict[str, str]:
    """A browser's headers: no Authorization, and other cookies beside ours."""
    return {"authorization": "", "cookie": f"theme=dark; {COOKIE}={token}; x_stream_gw=1", **more}


async def set_cookie(gate: Gate, token: str, **headers: str) -> str:
    reply = await gate.ask("POST", "/v1/cookie", headers=bearer(token, **headers))
    assert (reply.status, reply.body) == (204, b""), reply
    return reply.headers["set-cookie"]


# --- set and cleared -----------------------------------------------------------------------------------------


async def test_a_capability_token_becomes_a_cookie_and_goes(one: Gate) -> None:
    token = await mint(one, scopes=["read"], expires_in_s=60)
    reply = await one.ask("POST", "/v1/cookie", headers=bearer(token))
    assert (reply.status, reply.body, reply.headers["cache-control"]) == (204, b"", "no-store")
    found = re.fullmatch(
        r"stream_gw=(\S+); HttpOnly; SameSite=Strict; Path=/v1/streams; Max-Age=(\d+)", reply.headers["set-cookie"]
    )
    assert found and found[1] == token
    assert 50 < int(found[2]) <= 60
    reply = await one.ask("DELETE", "/v1/cookie", headers={"authorization": ""})
    assert (reply.status, reply.body) == (204, b"")
    assert reply.headers["set-cookie"] == "stream_gw=; HttpOnly; SameSite=Strict; Path=/v1/streams; Max-Age=0"
    refusal(await one.ask("GET", "/v1/cookie"), 405, "method_not_allowed")


@pytest.mark.parametrize(
    ("headers", "secure"),
    [
        ({"host": "localhost:8080"}, False),
        ({"host": "chat.localhost"}, False),
        ({"host": "127.0.0.1:8080"}, False),
        ({"host": "127.9.9.9"}, False),
        ({"host": "[::1]:8080"}, False),
        ({"host": "localhost", "origin": "http://localhost:3000"}, False),
        ({"host": "localhost", "x-forwarded-proto": "http"}, False),
        ({"host": "chat.example"}, True),
        ({"host": "192.168.0.7:8080"}, True),
        ({"host": "localhost.example"}, True),
        ({"host": "127.0.0.1.example"}, True),
        ({"host": "127.0.0.1@chat.example"}, True),
        ({"host": "[::1"}, True),
        # A proxy that puts its own name for us into Host
        ({"host": "127.0.0.1:8080", "origin": "https://chat.example"}, True),
        ({"host": "127.0.0.1:8080", "origin": "http://chat.example"}, True),
        ({"host": "127.0.0.1:8080", "origin": "null"}, True),
        ({"host": "127.0.0.1:8080", "x-forwarded-proto": "https"}, True),
        # A client's own headers loosen nothing
        ({"host": "chat.example", "origin": "http://localhost", "x-forwarded-proto": "http"}, True),
    ],
    ids=str,
)
async def test_a_cookie_is_secure_except_on_one_machine(one: Gate, headers: dict[str, str], secure: bool) -> None:
    token = await mint(one, scopes=["read"])
    assert (await set_cookie(one, token, **headers)).endswith("; Secure") is secure
    reply = await one.ask("DELETE", "/v1/cookie", headers={"authorization": "", **headers})
    assert reply.headers["set-cookie"].endswith("; Secure") is secure


async def test_credentials_that_cannot_become_a_cookie(one: Gate) -> None:
    reply = await one.ask("POST", "/v1/cookie")
    error = refusal(reply, 403, "forbidden")
    assert "capability token" in error["message"] and "/v1/tokens" in error["message"]
    assert "set-cookie" not in reply.headers
    writer = await mint(one, scopes=["create"])
    refusal(await one.ask("POST", "/v1/cookie", headers=bearer(writer)), 403, "forbidden")
    refusal(await one.ask("POST", "/v1/cookie", headers={"authorization": ""}), 401, "invalid_api_key")
    reader = await mint(one, scopes=["read"])
    refusal(await one.ask("POST", "/v1/cookie", headers=cookie(reader)), 401, "invalid_api_key")
    more = (COOKIE_BYTES_MAX - 4 - len(await mint(one, scopes=["read"], models=[""]))) * 3 // 4  # Base64
    long = await mint(one, scopes=["read"], models=["m" * more])
    assert len(long) <= COOKIE_BYTES_MAX < len(COOKIE) + len(long)
    assert (await one.ask("GET", "/v1/models", headers=bearer(long))).status == 200, "as a header it is taken"
    refusal(await one.ask("POST", "/v1/cookie", headers=bearer(long)), 400, "invalid_request")


# --- what it opens -------------------------------------------------------------------------------------------


async def test_a_cookie_reads_a_stream_on_any_gateway(one: Gate, two: Gate) -> None:
    stream, body = await one.finished(12)
    token = await mint(one, scopes=["read"])
    path = f"/v1/streams/{stream}"
    for site in ({}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
        reply = await two.ask("GET", path, headers=cookie(token, **site))
        assert (reply.status, reply.body) == (200, body)
    assert (await two.ask("HEAD", path, headers=cookie(token))).status == 200
    middle = events(body)[5]
    reply = await two.ask("GET", path, headers=cookie(token, **{"last-event-id": middle.id or ""}))
    assert after_heartbeat(reply.body) == body[middle.end :]
    past = cookie(token, **EVENT_STREAM, **{"last-event-id": events(body)[-1].id or ""})
    assert (await two.ask("GET", path, headers=past)).status == 204, "it tells an EventSource to stay away"


async def test_a_cookie_can_only_read_streams(one: Gate, two: Gate) -> None:
    """The token has every scope. As a cookie, which any site can make the browser send, it has only ``read``."""
    user = f"cookie-{time.time_ns()}"
    token = await mint(one)
    stream = await one.background(3000, user=user)
    path = f"/v1/streams/{stream}"
    requests: list[tuple[str, str, Any]] = [
        ("POST", f"{path}/cancel", None),
        ("POST", f"{path}/input", {"id": "i1", "item": {}}),
        ("GET", f"{path}/info", None),
        ("GET", f"/v1/streams?user={user}", None),
        ("GET", "/v1/models", None),
        ("POST", "/v1/tokens", {}),
        ("POST", "/v1/cookie", None),
        ("POST", "/v1/chat/completions", chat(1)),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": "x"}),
    ]
    for method, where, body in requests:
        refusal(await two.ask(method, where, body, cookie(token)), 401, "invalid_api_key")
        if where not in ("/v1/tokens", "/v1/cookie"):
            assert (await two.ask(method, where, body, bearer(token))).status < 500, "the token itself is asked about"
        if where.endswith("/cancel"):
            stream = await one.background(3000, user=user)  # the token itself has cancelled it
            path = f"/v1/streams/{stream}"
    for method in ("POST", "PUT", "DELETE"):
        refusal(await two.ask(method, path, None, cookie(token)), 405, "method_not_allowed")
    async with two.socket(headers={"Cookie": f"{COOKIE}={token}"}) as socket:
        await socket.sub(1, stream)
        assert await socket.close_code() == 4401
    await one.cancel(stream)


async def test_a_cookie_gives_no_more_than_its_token(one: Gate, tenants: Tenants) -> None:
    stream, _ = await one.finished(1)
    writer = await mint(one, scopes=["create", "cancel"])
    refusal(await one.ask("GET", f"/v1/streams/{stream}", headers=cookie(writer)), 403, "forbidden")
    acmes, body = await tenants.acme.finished(2, user="u1")
    for gate, asked, status in (
        (tenants.acme, {"user": "u1"}, 200),
        (tenants.acme, {"user": "u2"}, 404),
        (tenants.globex, {}, 404),
    ):
        reply = await gate.ask("GET", f"/v1/streams/{acmes}", headers=cookie(await mint(gate, **asked)))
        assert reply.status == status, reply
        assert status != 200 or reply.body == body


async def test_a_cookie_from_another_sites_page_is_refused(one: Gate) -> None:
    stream, _ = await one.finished(1)
    token = await mint(one, scopes=["read"])
    for method in ("GET", "HEAD"):
        headers = cookie(token, **{"sec-fetch-site": "cross-site"})
        assert (await one.ask(method, f"/v1/streams/{stream}", headers=headers)).status == 401
        headers = bearer(token, **{"sec-fetch-site": "cross-site"})
        assert (await one.ask(method, f"/v1/streams/{stream}", headers=headers)).status == 200, "a header is no cookie"


async def test_an_invalid_cookie_is_refused(one: Gate) -> None:
    stream, _ = await one.finished(1)
    token = await mint(one, scopes=["read"])

    async def ask(value: str) -> Reply:
        return await one.ask("GET", f"/v1/streams/{stream}", headers=cookie(value))

    assert (await ask(token)).status == 200
    body, _, signature = token.partition(".")
    wrong = [
        f"{body}.{'A' if signature[0] != 'A' else 'B'}{signature[1:]}",
        f"{body[:-1]}{'A' if body[-1] != 'A' else 'B'}.{signature}",
        body,
        "",
        "cap_",
        one.key,  # an API key is never taken from a cookie
        "\xff.\xff",
        f'"{token}"',
    ]
    for value in wrong:
        reply = await ask(value)
        refusal(reply, 401, "invalid_api_key")
        assert not value or value == body or value not in reply.body.decode()


async def test_a_cookies_token_expires(one: Gate) -> None:
    stream, _ = await one.finished(1)
    token = await mint(one, scopes=["read"], expires_in_s=2)

    async def ask() -> Reply:
        return await one.ask("GET", f"/v1/streams/{stream}", headers=cookie(token))

    assert (await ask()).status == 200

    async def refused() -> Reply | None:
        reply = await ask()
        return reply if reply.status != 200 else None

    assert "expired" in refusal(await eventually(refused, "the token to expire"), 401, "invalid_api_key")["message"]


@pytest.mark.parametrize("header", [{"authorization": "Bearer sk-wrong"}, {"authorization": "Basic YTpi"}])
async def test_the_authorization_header_wins_over_the_cookie(one: Gate, header: dict[str, str]) -> None:
    stream, _ = await one.finished(1)
    headers = cookie(await mint(one, scopes=["read"])) | header
    refusal(await one.ask("GET", f"/v1/streams/{stream}", headers=headers), 401, "invalid_api_key")
    headers |= {"authorization": "", "x-api-key": "sk-wrong"}
    refusal(await one.ask("GET", f"/v1/streams/{stream}", headers=headers), 401, "invalid_api_key")


@pytest.mark.platform
async def test_a_cookie_appears_in_no_log(platform: Running, one: Gate) -> None:
    stream, _ = await one.finished(1)
    with platform.gateway(STREAM_GW_TOKEN_SECRET=secrets.token_hex(16)) as process:
        gate = Gate(process.facts["url"], process.pid, platform.key)
        token = await mint(gate, scopes=["read"])
        secret = token.rpartition(".")[2]
        await set_cookie(gate, token)
        whole = gate.request("GET", f"/v1/streams/{stream}", headers=cookie(token))
        for raw in (
            whole,
            whole.replace(b"resp_", b"nobody_"),
            whole.replace(secret.encode(), secret.encode() + b"!"),
            whole.replace(b"\r\n\r\n", b"\r\nbad name : x\r\n\r\n"),
        ):
            async with gate.connection() as exchange:
                await exchange.send(raw)
                reply = await exchange.answer()
            assert secret not in reply.body.decode() + str(reply.headers)
        metrics = (await gate.ask("GET", "/metrics")).body.decode()
        assert "/v1/cookie" in metrics and secret not in metrics
        assert process.log.count("stream_gw.observe.access") >= 2, "it does write something"
        assert secret not in process.log


# --- when to come back ---------------------------------------------------------------------------------------


async def test_an_event_source_gets_its_retry_time(one: Gate) -> None:
    """In the first event: a block of its own would be an event without data to some clients."""
    stream, plain = await one.finished(5)
    waits = set()
    for _ in range(5):
        body = (await one.ask("GET", f"/v1/streams/{stream}", headers=EVENT_STREAM)).body
        found = re.match(rb": hb\nretry: (\d+)\ndata: ", body)
        assert found and SSE_RETRY_MS_MIN <= int(found[1]) <= SSE_RETRY_MS_MAX
        waits.add(int(found[1]))
        assert HEARTBEAT + body[found.end() - len("data: ") :] == plain, "and nothing else differs"
    assert len(waits) > 1, "readers do not all come back at once"
    async with one.create(chat(3), EVENT_STREAM) as exchange:
        assert re.match(rb": hb\nretry: \d+\n", await exchange.rest())
