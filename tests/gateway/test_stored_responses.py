"""Stored responses on whole platforms, with the official SDK: conversations, compaction, a killed gateway, SQL away."""

from __future__ import annotations

import secrets
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from stream_fabric.limits import METADATA_BODY_BYTES_MAX
from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.stream.ids import StreamId
from stream_gw.auth import key_digest, new_key
from stream_gw.responses import StorePolicy
from stream_gw.transport.reference.document import make_document
from stream_gw.transport.reference.operations import OPERATIONS
from tests.gateway.processes import Process, Running, running
from tests.gateway.responses_socket.wire import code_of, opened
from tests.gateway.wire import MODEL, Gate, refusal
from tests.responses.conftest import ACME, NOWHERE, Platform, prefix_of
from tests.responses.conftest import Gateway as OwnGateway
from tests.support.waiting import eventually

pytestmark = [pytest.mark.platform, pytest.mark.timeout(120)]

NEVER = {"/v1/responses/{id}": "resp_" + "0" * 32, "/v1/conversations/{id}": "conv_" + "0" * 32}
HELLO = [{"role": "user", "content": "Hello"}]


class Setup(NamedTuple):
    platform: Running
    keys: dict[str, str]
    env: dict[str, str]
    database: Path

    def gateway(self, name: str, **env: str) -> Any:
        return self.platform.gateway("--gateway", name, **(self.env | env))

    def gate(self, process: Process, who: str = "acme") -> Gate:
        return Gate(process.facts["url"], process.pid, self.keys[who])


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("stored")
    keys = {name: new_key(HostRandom()) for name in ("acme", "globex", "zero")}
    file, database = folder / "keys.toml", folder / "tenants.db"
    tenants = "".join(
        f'[[tenant]]\nid = "{name}"\nplan = "{plan}"\n[[tenant.key]]\nsha256 = "{key_digest(keys[name])}"\n'
        for name, plan in (("acme", "usual"), ("globex", "usual"), ("zero", "zero"))
    )
    file.write_text(tenants + "[plan.usual]\nresponse_days = 7\n[plan.zero]\nretention_s = 0\n")
    env = {
        "STREAM_GW_KEYS_FILE": str(file),
        "STREAM_GW_DATABASE_URL": f"sqlite:///{database}",
        "STREAM_GW_TOKEN_SECRET": secrets.token_hex(16),
    }
    with running(sim="itl_ms=0,ttft_ms=0", gateways=1) as platform:
        yield Setup(platform, keys, env, database)


@pytest.fixture(scope="module")
def process(setup: Setup) -> Iterator[Process]:
    with setup.gateway("stored") as started:
        yield started


@asynccontextmanager
async def sdk(gate: Gate) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=gate.key, max_retries=0) as client:
        yield client


async def begun(setup: Setup, gate: Gate, redis: RedisClient, text: str = "Hello") -> StreamId:
    """Begin a stored response over an ended stream of the platform, as a gateway that then died."""
    stream = (await gate.finished(5))[0]
    own = OwnGateway(Platform(redis, ""), None, StorePolicy(), 1 << 20)
    assert await own.store.begun(ACME, own.platform.response(text, id=StreamId(stream)))
    return StreamId(stream)


@pytest.fixture
async def redis(setup: Setup) -> AsyncIterator[RedisClient]:
    client = RedisClient(setup.platform.redis_url)
    await client.start()
    yield client
    await client.close()


def row_of(setup: Setup, response: str) -> Any:
    with sqlite3.connect(setup.database) as connection:
        found = connection.execute("SELECT bytes FROM responses WHERE id = ?", (response,)).fetchone()
    connection.close()
    return found


# --- storage --------------------------------------------------------------------------------------------------


async def test_a_response_of_a_killed_gateway_is_stored_by_another_one(setup: Setup, redis: RedisClient) -> None:
    with setup.gateway("first") as first, setup.gateway("second") as second:
        second.signal(signal.SIGSTOP)  # it cannot have done it before the first one died
        response = await begun(setup, setup.gate(first), redis)
        first.signal(signal.SIGKILL)
        first.wait()
        second.signal(signal.SIGCONT)
        await eventually(lambda: row_of(setup, response))
        await redis.execute(0, "DEL", f"{prefix_of(ACME)}r:{response}")
        reply = await setup.gate(second).ask("GET", f"/v1/responses/{response}/input_items")
        assert reply.status == 200
        [item] = reply.json["data"]
        assert item["content"] == [{"type": "input_text", "text": "Hello"}]


async def test_the_sdk_reads_input_items(setup: Setup, process: Process, redis: RedisClient) -> None:
    gate = setup.gate(process)
    response = await begun(setup, gate, redis, "Hello there")
    async with sdk(gate) as client:
        page = await client.responses.input_items.list(response)
        assert [item.type for item in page.data] == ["message"]
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list(NEVER["/v1/responses/{id}"])


async def test_without_sql_only_what_redis_has_is_served(setup: Setup, redis: RedisClient) -> None:
    with setup.gateway("away", STREAM_GW_DATABASE_URL=NOWHERE) as away:
        gate = setup.gate(away)
        response = await begun(setup, gate, redis)
        assert (await gate.ask("GET", f"/v1/responses/{response}/input_items")).status == 200
        for method, path, body in (
            ("GET", f"/v1/responses/{NEVER['/v1/responses/{id}']}/input_items", None),
            ("POST", "/v1/conversations", {}),
        ):
            error = refusal(await gate.ask(method, path, body), 503, "responses_unavailable")
            assert error["message"] == "stored responses cannot be reached; retry" and error["retriable"]
        assert (await gate.ask("GET", "/readyz")).status == 200, "streams need no database"


async def test_a_response_refused_for_want_of_the_database_counts_against_the_platform(setup: Setup) -> None:
    previous = {"previous_response_id": NEVER["/v1/responses/{id}"]}
    with setup.gateway("away", STREAM_GW_DATABASE_URL=NOWHERE) as away:
        gate = setup.gate(away)
        body = {"model": MODEL, "input": "x", **previous}
        refusal(await gate.ask("POST", "/v1/responses", body), 503, "responses_unavailable")
        async with opened(gate) as wire:
            await wire.create(**previous)
            assert code_of(await wire.receive()) == (503, "responses_unavailable")
        seen = (await gate.ask("GET", "/metrics")).body.decode()
    assert 'reads_by_dialect_total{dialect="openai.responses",fault="platform"} 2.0' in seen
    assert 'reads_total{ended="refused",fault="platform",pool="",role="refused"} 2.0' in seen


# --- conversations ------------------------------------------------------------------------------------------------


async def test_the_sdk_keeps_a_conversation(setup: Setup, process: Process) -> None:
    async with sdk(setup.gate(process)) as client:
        made = await client.conversations.create(items=[{"role": "user", "content": "m0"}], metadata={"topic": "a"})
        assert (await client.conversations.retrieve(made.id)).metadata == {"topic": "a"}
        assert (await client.conversations.update(made.id, metadata={"topic": "b"})).metadata == {"topic": "b"}
        assert (await client.conversations.update(made.id, metadata=None)).metadata == {}
        added = await client.conversations.items.create(made.id, items=[{"role": "user", "content": "m1"}])
        listed = [item.id async for item in client.conversations.items.list(made.id, order="asc", limit=1)]
        assert listed[1:] == [added.data[0].id] and len(listed) == 2
        one = await client.conversations.items.retrieve(listed[0], conversation_id=made.id)
        assert one.type == "message"
        await client.conversations.items.delete(listed[0], conversation_id=made.id)
        assert [item.id async for item in client.conversations.items.list(made.id)] == listed[1:]
        gone = await client.conversations.delete(made.id)
        assert gone.deleted
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)


async def test_a_repeat_by_key_attaches_though_its_conversation_has_grown(setup: Setup, process: Process) -> None:
    gate, key = setup.gate(process), {"Idempotency-Key": "in a conversation"}
    made = await gate.ask("POST", "/v1/conversations", {})
    asked = {"model": "sim-small", "input": "Hello", "conversation": made.json["id"], "max_output_tokens": 5}
    first = await gate.ask("POST", "/v1/responses", asked, key)
    assert first.status == 200, first

    async def grown() -> bool:
        items = await gate.ask("GET", f"/v1/conversations/{made.json['id']}/items")
        return len(items.json["data"]) == 2

    await eventually(grown, "the answer in the conversation")
    again = await gate.ask("POST", "/v1/responses", asked, key)
    assert (again.status, again.json["id"]) == (200, first.json["id"])
    other = await gate.ask("POST", "/v1/responses", asked | {"input": "Bye"}, key)
    assert (other.status, other.json["error"]["code"]) == (422, "idempotency_mismatch")


async def test_bounds_and_rights_of_conversations_are_told(setup: Setup, process: Process) -> None:
    gate = setup.gate(process)
    for body in (
        {"items": HELLO * 21},
        {"metadata": {"k" * 65: "v"}},
        {"metadata": {"k": "v" * 513}},
        {"metadata": {str(number): "" for number in range(17)}},
        {"items": [{"type": 1}]},
        {"items": [{"role": "user", "content": "x", "id": "i" * 201}]},
    ):
        refusal(await gate.ask("POST", "/v1/conversations", body), 400, "invalid_request")
    large = {"metadata": {"k": "v" * METADATA_BODY_BYTES_MAX}}
    refusal(
        await gate.ask("POST", f"/v1/conversations/{NEVER['/v1/conversations/{id}']}", large), 413, "body_too_large"
    )
    refusal(await setup.gate(process, "zero").ask("POST", "/v1/conversations", {}), 400, "unsupported")
    token = (await gate.ask("POST", "/v1/tokens", {"scopes": ["read"]})).json["token"]
    refusal(await Gate(gate.url, gate.pid, token).ask("POST", "/v1/conversations", {}), 403, "forbidden")


@pytest.mark.parametrize(
    ("item", "code"),
    [
        ({"role": "robot", "content": "x"}, "invalid_request"),
        ({"role": "user", "content": 5}, "invalid_request"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "invalid_request"),
        ({"type": "web_search_call", "id": "ws_1"}, "unsupported"),
        ({"type": "item_reference", "id": "msg_1"}, "unsupported"),
        ({"type": "compaction", "encrypted_content": "theirs"}, "invalid_request"),
    ],
)
async def test_an_item_that_no_response_can_use_is_not_added(
    setup: Setup, process: Process, item: dict[str, Any], code: str
) -> None:
    """Else every later response of the conversation would be refused for it."""
    gate = setup.gate(process)
    refusal(await gate.ask("POST", "/v1/conversations", {"items": [item]}), 400, code)
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    path = f"/v1/conversations/{(await gate.ask('POST', '/v1/conversations', {'items': [call]})).json['id']}/items"
    refusal(await gate.ask("POST", path, {"items": [*HELLO, item]}), 400, code)
    output = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    assert (await gate.ask("POST", path, {"items": [output]})).status == 200
    assert [each["type"] for each in (await gate.ask("GET", path)).json["data"]] == [output["type"], call["type"]]


async def test_what_is_stored_is_read_with_the_scope_of_a_reader_alone(setup: Setup, process: Process) -> None:
    """An answer can repeat what it builds on."""
    gate = setup.gate(process)
    token = (await gate.ask("POST", "/v1/tokens", {"scopes": ["create"]})).json["token"]
    writer = Gate(gate.url, gate.pid, token)
    asked = {"model": MODEL, "input": "Hello", "max_output_tokens": 5}
    first = (await gate.ask("POST", "/v1/responses", asked)).json
    conversation = (await gate.ask("POST", "/v1/conversations", {"items": HELLO})).json["id"]
    for more in (
        {"previous_response_id": first["id"]},
        {"conversation": conversation},
        {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}, *HELLO]},
    ):
        refusal(await writer.ask("POST", "/v1/responses", asked | more), 403, "forbidden")
        assert (await gate.ask("POST", "/v1/responses", asked | more)).status == 200
    compacted = {"model": MODEL, "previous_response_id": first["id"]}
    refusal(await writer.ask("POST", "/v1/responses/compact", compacted), 403, "forbidden")
    assert (await writer.ask("POST", "/v1/responses", asked)).status == 200


# --- compaction -----------------------------------------------------------------------------------------------------


async def test_the_sdk_compacts_and_the_summary_comes_back(setup: Setup, process: Process, redis: RedisClient) -> None:
    gate = setup.gate(process)
    previous = await begun(setup, gate, redis, "A first question")
    async with sdk(gate) as client:
        made = await client.responses.compact(
            model=MODEL, previous_response_id=previous, input="A second question", instructions="Be brief"
        )
        assert made.object == "response.compaction" and made.usage.output_tokens > 0
        assert [item.type for item in made.output] == ["message", "message", "compaction"]
        # The SDK has one type for messages of both roles, and warns of the user's parts
        output: Any = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
        again = await client.responses.compact(model=MODEL, input=output)
        assert [item.type for item in again.output] == ["message", "message", "compaction"]
        assert again.usage.input_tokens > 0
        with pytest.raises(openai.BadRequestError, match="compaction item cannot be read"):
            async with sdk(setup.gate(process, "globex")) as stranger:
                await stranger.responses.compact(model=MODEL, input=output)


async def test_a_conversation_is_compacted_before_the_answer_and_goes_on_from_there(
    setup: Setup, process: Process
) -> None:
    turns: Any = [{"role": role, "content": "word " * 100} for _ in range(8) for role in ("user", "assistant")]
    ask: dict[str, Any] = {"model": MODEL, "max_output_tokens": 20}
    async with sdk(setup.gate(process)) as client:
        made = await client.conversations.create(items=turns)
        response = await client.responses.create(
            **ask,
            conversation=made.id,
            input="And?",
            context_management=[{"type": "compaction", "compact_threshold": 500}],
        )
        assert [item.type for item in response.output] == ["compaction", "message"]
        again = await client.responses.create(**ask, conversation=made.id, input="Go on.")
        assert again.usage is not None and again.usage.input_tokens < 1000
        items = [item async for item in client.conversations.items.list(made.id, order="asc")]
        assert [item.type for item in items[16:19]] == ["message", "compaction", "message"]


async def test_what_cannot_be_compacted_is_refused(setup: Setup, process: Process) -> None:
    gate = setup.gate(process)
    refusal(await gate.ask("POST", "/v1/responses/compact", {"input": "x"}), 400, "invalid_request")
    refusal(await gate.ask("POST", "/v1/responses/compact", {"model": MODEL}), 400, "invalid_request")
    body = {"model": MODEL, "previous_response_id": NEVER["/v1/responses/{id}"]}
    refusal(await gate.ask("POST", "/v1/responses/compact", body), 404, "previous_response_not_found")
    refusal(await gate.ask("POST", "/v1/responses/compact", {"model": "none", "input": "x"}), 404, "model_not_found")


# --- isolation ------------------------------------------------------------------------------------------------------


async def test_every_operation_answers_like_for_an_id_that_never_existed(
    setup: Setup, process: Process, redis: RedisClient
) -> None:
    owner = setup.gate(process)
    made = (await owner.ask("POST", "/v1/conversations", {"items": HELLO})).json["id"]
    [item] = (await owner.ask("GET", f"/v1/conversations/{made}/items")).json["data"]
    theirs = {"/v1/responses/{id}": await begun(setup, owner, redis), "/v1/conversations/{id}": made}
    token = (await owner.ask("POST", "/v1/tokens", {"user": "bob"})).json["token"]
    strangers = [setup.gate(process, "globex"), Gate(owner.url, owner.pid, token)]
    walked = 0
    for path, methods in make_document(OPERATIONS)["paths"].items():
        for prefix, never in NEVER.items():
            if not path.startswith(prefix) or path.endswith("/cancel"):
                continue
            for method in methods:
                for stranger in strangers:
                    body = {"metadata": {}, "items": HELLO} if method == "post" else None
                    asked = path.replace("{item_id}", item["id"])
                    told = []
                    for id_ in (theirs[prefix], never):
                        reply = await stranger.ask(method.upper(), asked.replace("{id}", id_), body)
                        text = reply.body.decode().replace(id_, "<id>").replace(reply.headers["x-request-id"], "")
                        told.append((reply.status, text))
                    assert told[0] == told[1] and told[0][0] == 404, (method, path)
                    walked += 1
    assert walked >= 16
    assert (await owner.ask("GET", f"/v1/conversations/{made}/items/{item['id']}")).status == 200


async def test_a_socket_remembers_for_a_plan_that_keeps_nothing(setup: Setup, process: Process) -> None:
    gate = setup.gate(process, "zero")
    async with opened(gate) as ws:
        first = await ws.turn()
        second = await ws.turn(text="Go on.", previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        warm = await ws.turn(text="Wait.", generate=False)
        assert (await ws.turn(text="Go on.", previous_response_id=warm["id"]))["previous_response_id"] == warm["id"]
    for response in (first, second, warm):
        assert (await gate.ask("GET", f"/v1/responses/{response['id']}")).status == 404
        assert row_of(setup, response["id"]) is None
    async with opened(gate) as ws:
        assert code_of(await ws.turn(previous_response_id=second["id"])) == (404, "previous_response_not_found")


async def test_a_warm_up_and_a_conversation_over_a_socket(setup: Setup, process: Process) -> None:
    gate = setup.gate(process)
    async with sdk(gate) as client:
        conversation = (await client.conversations.create()).id
        async with opened(gate) as ws:
            warm = await ws.turn(text="You will hear of lakes.", generate=False, conversation=conversation)
            said = await ws.turn(text="Of what?", conversation=conversation)
            alone = await ws.turn(text="Of what?")
            assert said["conversation"] == {"id": conversation}
            assert said["usage"]["input_tokens"] > alone["usage"]["input_tokens"]
        await eventually(lambda: row_of(setup, warm["id"]) and row_of(setup, said["id"]), "both to be stored")
        page = await client.conversations.items.list(conversation, order="asc")
        assert [item.role for item in page.data] == ["user", "user", "assistant"]  # type: ignore[union-attr]
