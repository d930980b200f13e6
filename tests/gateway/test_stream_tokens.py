"""Capability tokens that are limited to one stream: what they read, and everything that they are refused."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import jwt
import pytest
from websockets.exceptions import ConnectionClosed

from stream_fabric.errors import BadRequest, FabricError, Forbidden, Unauthenticated
from stream_fabric.limits import LINKS_ENDED_S
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.index import RedisLinks
from stream_fabric.stream.ids import TenantId, new_stream_id
from stream_gw.auth import ALL_SCOPES, Authenticator, KeyStore, Principal, TokenRequest, dev_record, tokens
from stream_gw.auth.authenticator import TOKEN_S_MAX
from stream_gw.auth.tokens import TokenSigner
from stream_gw.streams.links.links import StreamLinks
from stream_gw.transport.reference.operations import OPERATIONS
from tests.gateway.conftest import Tenants
from tests.gateway.processes import Running
from tests.gateway.test_revocation import Fleet, fleet, seconds_until  # noqa: F401  # a fixture
from tests.gateway.test_ui_chat import new_chat
from tests.gateway.test_ui_socket import PROTOCOL as CHATS
from tests.gateway.test_ui_socket import opened as chat_socket
from tests.gateway.wire import MODEL, Gate, chat, events, refusal
from tests.support.waiting import eventually

STREAM = "resp_" + "0f" * 16
NOW = 1_800_000_000.0
OWNER = Principal(TenantId("acme"), ALL_SCOPES)


@pytest.fixture
def authenticator() -> Authenticator:
    return Authenticator(KeyStore([dev_record("acme", "sk-test")]), TokenSigner(b"sixteen bytes at least"))


async def link(gate: Gate, stream: str, **more: Any) -> Gate:
    """The gateway as the holder of a link to the stream sees it."""
    reply = await gate.ask("POST", "/v1/tokens", {"scopes": ["read"], "stream": stream, **more})
    assert reply.status == 200, reply
    return replace(gate, key=reply.json["token"])


# --- the token -------------------------------------------------------------------------------------------------


def test_a_token_names_its_stream(authenticator: Authenticator) -> None:
    token, _ = authenticator.mint(OWNER, TokenRequest(["read"], stream=STREAM), NOW)
    who = authenticator.authenticate(token, NOW)
    assert (who.stream, who.scopes, who.expires_at) == (STREAM, {"read"}, NOW + 3600)
    assert who.may_read(STREAM) and not who.may_read("resp_" + "0" * 32)
    with pytest.raises(Forbidden, match="only reads stream"):
        who.require_any_stream()
    with pytest.raises(Unauthenticated, match="expired"):
        authenticator.authenticate(token, NOW + 3600)
    assert authenticator.reason_to_end(who, NOW + 3599) is None
    assert isinstance(authenticator.reason_to_end(who, NOW + 3600), Unauthenticated), "who watches is disconnected"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (TokenRequest(stream=STREAM), "scopes"),
        (TokenRequest(["read", "cancel"], stream=STREAM), "scopes"),
        (TokenRequest([], stream=STREAM), "scopes"),
        (TokenRequest(["read"], stream="resp_1"), "stream"),
        (TokenRequest(["read"], stream=""), "stream"),
    ],
)
def test_a_token_of_a_stream_only_reads(authenticator: Authenticator, asked: TokenRequest, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        authenticator.mint(OWNER, asked, NOW)
    assert refused.value.param == param


def test_a_release_that_does_not_know_the_limit_refuses_the_token(authenticator: Authenticator) -> None:
    """It would ignore the unknown claim, and the token would read every stream of its tenant."""
    limited, _ = authenticator.mint(OWNER, TokenRequest(["read"], stream=STREAM), NOW)
    plain, _ = authenticator.mint(OWNER, TokenRequest(["read"]), NOW)
    options: Any = {"verify_signature": False}
    audiences = [jwt.decode(token.removeprefix("cap_"), options=options)["aud"] for token in (plain, limited)]
    assert audiences == ["stream-gw", "stream-gw/stream"]


@pytest.mark.parametrize("changes", [{"aud": "stream-gw"}, {"stream": None}, {"stream": 5}, {"aud": ["stream-gw"]}])
def test_a_limit_and_its_audience_belong_together(changes: dict[str, Any]) -> None:
    signer = TokenSigner(b"sixteen bytes at least")
    token = signer.sign(tokens.Claims("acme", ["read"], int(NOW) + 60, stream=STREAM)).removeprefix("cap_")
    assert signer.verify(f"cap_{token}") is not None
    options: Any = {"verify_signature": False}
    claims = {**jwt.decode(token, options=options), **changes}
    (key,) = signer._keys.values()
    forged = jwt.encode(claims, key, "HS256", headers={"kid": jwt.get_unverified_header(token)["kid"]})
    assert signer.verify(f"cap_{forged}") is None


# --- a gateway -------------------------------------------------------------------------------------------------


async def test_the_holder_of_a_link_reads_the_stream(tenants: Tenants) -> None:
    stream, _ = await tenants.acme.finished(20, user="u1")
    holder = await link(tenants.acme, stream)
    mine, theirs = [await gate.ask("GET", f"/v1/streams/{stream}") for gate in (tenants.acme, holder)]
    assert theirs.status == 200 and theirs.body == mine.body
    assert (await holder.ask("HEAD", f"/v1/streams/{stream}")).status == 200
    async with holder.socket() as socket:
        await socket.send("sub", ch=1, stream=stream, after="1-0", mode="snapshot")
        assert (await socket.until_t("end", ch=1))["status"] == "completed"


async def test_every_operation_but_reading_the_stream_is_refused(tenants: Tenants) -> None:
    """A walk over the API's document, so that an operation that is added later is refused too."""
    stream = await tenants.acme.background(100_000, user="u1")
    holder = await link(tenants.acme, stream)
    walked = 0
    for operation in OPERATIONS:
        if operation.path == "/v1/streams/{id}" or not operation.path.startswith("/v1/"):
            continue
        if operation.scope is None:  # it needs no credential
            continue
        path = operation.path.replace("{id}", stream if "/streams/" in operation.path else "x")
        for name in ("rest", "tenant", "name", "model"):
            path = path.replace("{" + name + "}", "x")
        body = chat(1) if operation.method in ("post", "put", "patch") else None
        reply = await holder.ask(operation.method.upper(), path, body)
        assert (reply.status, reply.json["error"]["code"]) == (403, "forbidden"), operation
        walked += 1
    assert walked > 30
    refusal(await holder.ask("GET", "/v1/streams?user=u1"), 403, "forbidden")
    assert stream in [each["id"] for each in (await tenants.acme.ask("GET", "/v1/streams?user=u1")).json["data"]]
    assert (await tenants.acme.info(stream))["status"] == "live"
    assert (await tenants.acme.cancel(stream))["result"] == "accepted"


async def test_the_holder_of_a_link_sees_nothing_of_the_request(tenants: Tenants) -> None:
    """Events of a response repeat its instructions, tools and metadata: to its owner alone."""
    body = {"model": MODEL, "input": "Hello", "instructions": "Keep the secret.", "metadata": {"a": "secret"}}
    made = await tenants.acme.ask("POST", "/v1/responses", body)
    stream = made.headers["x-stream-id"]
    holder = await link(tenants.acme, stream)
    for dialect in ("", "?dialect=openai.responses", "?dialect=open.responses", "?dialect=openai.chat"):
        mine, theirs = [await gate.ask("GET", f"/v1/streams/{stream}{dialect}") for gate in (tenants.acme, holder)]
        assert theirs.status == 200 and b"secret" not in theirs.body
        assert (b"secret" in mine.body) == ("chat" not in dialect)
    for asked in ("", "?stream=true"):
        refusal(await holder.ask("GET", f"/v1/responses/{stream}{asked}"), 403, "forbidden")


async def test_another_stream_looks_as_if_it_never_existed(tenants: Tenants) -> None:
    stream, other = [(await tenants.acme.finished(3, user="u1"))[0] for _ in range(2)]
    holder = await link(tenants.acme, stream)
    for method in ("GET", "HEAD"):
        replies = [await holder.ask(method, f"/v1/streams/{name}") for name in (other, "resp_" + secrets.token_hex(16))]
        assert [reply.status for reply in replies] == [404, 404]
    assert (await tenants.acme.ask("GET", f"/v1/streams/{other}")).status == 200


async def test_a_socket_with_a_link_only_follows(tenants: Tenants) -> None:
    stream, other = [await tenants.acme.background(100_000, user="u1") for _ in range(2)]
    holder = await link(tenants.acme, stream)
    async with holder.socket() as socket:
        await socket.send("cancel", id="c", stream=stream)
        assert (await socket.until_t("error", id="c"))["code"] == "forbidden"
        await socket.send("input", id="i", stream=stream, item={})
        assert (await socket.until_t("error", id="i"))["code"] == "forbidden"
        await socket.create(1, chat(1))
        assert (await socket.until_t("error", ch=1))["code"] == "forbidden"
        for ch, mode in enumerate(("tokens", "coalesce", "snapshot"), 2):
            await socket.send("sub", ch=ch, stream=other, after="1-0", mode=mode)
            assert (await socket.until_t("error", ch=ch))["code"] == "not_found"
        await socket.send("sub", ch=9, stream=stream, after="1-0", mode="tokens")
        await socket.until_t("d", ch=9)
    for name in (stream, other):
        assert (await tenants.acme.cancel(name))["result"] == "accepted"


async def test_a_link_of_another_tenants_stream_reads_nothing(tenants: Tenants) -> None:
    stream, _ = await tenants.acme.finished(2)
    refusal(await (await link(tenants.globex, stream)).ask("GET", f"/v1/streams/{stream}"), 404, "not_found")


async def test_the_owner_ends_the_links_to_a_stream_at_every_gateway(one: Gate, two: Gate) -> None:
    """A watcher with an open socket and one with an open response, on the other gateway, and one who comes later."""
    stream, other = [await one.background(100_000, user="u1") for _ in range(2)]
    holder, elsewhere = await link(two, stream), await link(two, other)
    async with holder.socket() as socket, holder.open("GET", f"/v1/streams/{stream}") as response:
        await socket.send("sub", ch=1, stream=stream, after="1-0", mode="tokens")
        await socket.until_t("d", ch=1)
        await response.events(3)
        refusal(await holder.ask("DELETE", f"/v1/streams/{stream}/links"), 403, "forbidden")
        began = time.monotonic()
        assert (await one.ask("DELETE", f"/v1/streams/{stream}/links")).status == 204
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                await socket.receive(5.0)
        last = events(await response.rest())[-1]
        took = time.monotonic() - began
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401
    assert last.json["error"]["code"] == "link_ended" and last.id is None
    assert took < 4.0, "2 s are promised; the machine may be busy"
    for gate in (holder, replace(one, key=holder.key)):
        refusal(await gate.ask("GET", f"/v1/streams/{stream}"), 401, "link_ended")
    assert (await (await link(one, stream)).ask("HEAD", f"/v1/streams/{stream}")).status == 200, "a new link works"
    assert (await elsewhere.ask("HEAD", f"/v1/streams/{other}")).status == 200, "another stream's link stays"
    for name in (stream, other):
        assert (await one.cancel(name))["result"] == "accepted", "its own reader and the stream stay"


async def test_links_of_another_tenants_stream_cannot_be_ended(tenants: Tenants) -> None:
    stream, _ = await tenants.acme.finished(2)
    holder = await link(tenants.acme, stream)
    refusal(await tenants.globex.ask("DELETE", f"/v1/streams/{stream}/links"), 404, "not_found")
    assert (await holder.ask("HEAD", f"/v1/streams/{stream}")).status == 200


async def test_redis_is_not_asked_for_a_stream_that_is_none() -> None:
    reads: Any = None
    links = StreamLinks(RedisLinks(RedisClient("redis://127.0.0.1:1"), Partitions(4)), reads)
    assert await links.generation("x" * 100_000) == 0
    with pytest.raises(FabricError):
        await links.generation(STREAM)


async def test_a_recall_is_forgotten_after_its_tokens(redis_client: RedisClient) -> None:
    links, stream = RedisLinks(redis_client, Partitions(4)), new_stream_id(1, secrets.token_bytes(10))
    assert await links.generations([stream]) == {stream: 0}
    slot, key = links._key(stream)
    seen = [0]
    for _ in range(3):
        await links.end(stream)
        seen.append((await links.generations([stream]))[stream])
        assert seen[-1] > seen[-2]
        assert TOKEN_S_MAX < await redis_client.execute(slot, "TTL", key) <= LINKS_ENDED_S


async def test_a_recall_ends_tokens_that_were_minted_before_an_earlier_one_expired(redis_client: RedisClient) -> None:
    """The generation begins again in Redis, while a token of the last day is still valid."""
    links, stream = RedisLinks(redis_client, Partitions(4)), new_stream_id(1, secrets.token_bytes(10))
    await links.end(stream)
    minted = (await links.generations([stream]))[stream]
    slot, key = links._key(stream)
    await redis_client.execute(slot, "PEXPIRE", key, 1)

    async def forgotten() -> bool:
        return await links.generations([stream]) == {stream: 0}

    await eventually(forgotten, "the first recall to expire")
    await links.end(stream)
    holder = Principal(TenantId("acme"), frozenset({"read"}), stream=stream, link=minted)
    assert holder.link_error((await links.generations([stream]))[stream]) is not None


async def test_a_link_gains_nothing_from_another_token(tenants: Tenants) -> None:
    """A socket that changes its token keeps its channels, so the new token must reach what the old one does."""
    one = tenants.acme
    stream, other = [await one.background(100_000, user="u1") for _ in range(2)]
    holder, elsewhere = await link(one, stream), await link(one, other)
    again = await link(one, stream, expires_in_s=60)
    async with holder.socket() as socket:
        await socket.send("sub", ch=1, stream=stream, after="1-0", mode="tokens")
        await socket.until_t("d", ch=1)
        for token in (elsewhere.key, await user_token(one, "u2")):
            await socket.send("auth", token=token)
            assert (await socket.until_t("error"))["code"] == "invalid_request"
        await socket.send("auth", token=again.key)
        assert (await one.ask("DELETE", f"/v1/streams/{stream}/links")).status == 204
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                await socket.receive(5.0)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401
    for name in (stream, other):
        await one.cancel(name)


async def user_token(gate: Gate, user: str) -> str:
    token: str = (await gate.ask("POST", "/v1/tokens", {"scopes": ["read"], "user": user})).json["token"]
    return token


async def test_the_socket_of_chats_takes_no_link(tenants: Tenants) -> None:
    """A chat's answer is replayed with the message before it, which is not part of the stream."""
    stream, _ = await tenants.acme.finished(2)
    holder = await link(tenants.acme, stream)
    async with chat_socket(holder, [CHATS, f"bearer.{holder.key}"], {}) as socket:
        assert await socket.closed() == (4403, ANY)
    async with chat_socket(tenants.acme) as socket:
        headers = {"Authorization": f"Bearer {holder.key}"}
        await socket.send("resume", "r1", new_chat(), headers=headers)
        told = await socket.receive()
        assert (told["type"], told["requestId"], told["code"]) == ("error", "r1", "forbidden")
        await socket.send("resume", "r2", new_chat())
        assert await socket.receive() == {"type": "no-active", "requestId": "r2"}, "the socket goes on"


async def test_a_link_ends_with_its_key(fleet: Fleet) -> None:  # noqa: F811
    """A watcher with an open socket, and one who comes later."""
    _, key_id, key = fleet.tenant()
    owner = await fleet.gate(key)
    stream = await owner.background(100_000)
    holder = await link(owner, stream)
    async with holder.socket() as socket:
        await socket.send("sub", ch=1, stream=stream, after="1-0", mode="tokens")
        await socket.until_t("d", ch=1)
        fleet.run("keys", "revoke", key_id)
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                await socket.receive(5.0)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401

    async def refused() -> bool:
        return (await holder.ask("GET", f"/v1/streams/{stream}")).status == 401

    await seconds_until(refused)


async def test_gateways_tell_clients_which_one_they_reached(platform: Running) -> None:
    said = []
    for gate in (*platform.gates, platform.gates[0]):
        async with gate.socket() as socket:
            said.append((await socket.receive())["gateway"])
    assert said[0] == said[2] != said[1]
    assert all(name.startswith("gw_") for name in said)
