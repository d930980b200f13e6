"""Operators query traces through any gateway; other callers cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.processes import Running
from tests.gateway.wire import Gate
from tests.support.keys_file import operator_and_tenant
from tests.telemetry.asked import TOKEN, Asked
from tests.telemetry.fleet import fleet

pytestmark = pytest.mark.platform

PATH = "/v1/admin/traces"
HOUR = "since=2026-11-20T10:00:00Z&until=2026-11-20T11:00:00Z"


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    with Asked() as running:
        yield running


@pytest.fixture(scope="module")
def gates(platform: Running, asked: Asked, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gate, Gate]]:
    """The gateway with an operator's key and with a tenant's key."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    operator, tenant = operator_and_tenant(path, "acme")
    env = {
        "STREAM_GW_KEYS_FILE": str(path), "STREAM_GW_TELEMETRY_URL": asked.url, "STREAM_GW_TELEMETRY_TOKEN": TOKEN,
        "STREAM_GW_TOKEN_SECRET": "0123456789abcdef",
    }  # fmt: skip
    with platform.gateway(**env) as process:
        yield Gate(process.facts["url"], process.pid, operator), Gate(process.facts["url"], process.pid, tenant)


async def test_an_operator_asks_through_a_gateway(gates: tuple[Gate, Gate]) -> None:
    operator, _ = gates
    stream = fleet().planted["slow client"][0]
    reply = await operator.ask("GET", f"{PATH}/{stream}/why")
    assert (reply.status, reply.json["cause"]) == (200, "slow client")
    assert reply.headers["cache-control"] == "no-store"
    reply = await operator.ask("GET", f"{PATH}?{HOUR}&model=phi-4&top=7")
    assert [row["model"] for row in reply.json] == ["phi-4"] * 7
    reply = await operator.ask("GET", f"{PATH}/queries/faults?{HOUR}&format=text")
    assert "handed_over" in reply.json["text"]
    reply = await operator.ask("GET", f"{PATH}/pool?pool=llama&{HOUR}&top=3")
    whole = await operator.ask("GET", f"{PATH}/pool?pool=llama&{HOUR}&top=3&format=object")
    assert whole.json["data"] == reply.json and whole.json["note"].startswith("only the first 3 events; continue with ")
    assert (await operator.ask("GET", f"{PATH}?{HOUR}&format=object")).json["note"] == ""
    assert (await operator.ask("GET", f"{PATH}/resp_nobody/why")).status == 404
    assert (await operator.ask("GET", f"{PATH}/slow?phase=nonsense")).status == 400


async def test_only_operators_query_traces(gates: tuple[Gate, Gate]) -> None:
    operator, tenant = gates
    reply = await tenant.ask("GET", PATH)
    assert (reply.status, reply.json["error"]["code"]) == (403, "forbidden")
    minted = await tenant.ask("POST", "/v1/tokens", {"scopes": ["admin"]})
    assert minted.status == 403, "nobody gives away what he has not"
    stranger = Gate(operator.url, operator.pid, "sk-nobody")
    assert (await stranger.ask("GET", PATH)).status == 401
    token = (await operator.ask("POST", "/v1/tokens", {"scopes": ["admin"], "user": "u"})).json["token"]
    assert (await Gate(operator.url, operator.pid, token).ask("GET", PATH)).status == 403, "of one user"
    assert (await operator.ask("GET", "/v1/models")).status == 200
    reply = await operator.ask("POST", "/v1/chat/completions", {"model": "sim-small", "messages": []})
    assert reply.status in (400, 403), "an operator's key makes no streams"


@pytest.mark.parametrize("rest", ["/../query", "/%2e%2e/query", "/a/b/c/d", "/x%00y", "/..", "//evil.test/"])
async def test_only_trace_paths_are_passed_on(gates: tuple[Gate, Gate], rest: str) -> None:
    assert (await gates[0].ask("GET", PATH + rest)).status == 404


async def test_without_telemetry_the_remedy_is_named(platform: Running) -> None:
    reply = await platform.gates[0].ask("GET", PATH)
    assert (reply.status, reply.json["error"]["code"]) == (503, "traces_unavailable")
    assert "STREAM_GW_TELEMETRY_URL" in reply.json["error"]["message"]


async def test_telemetry_that_is_away_or_refuses_the_token_is_503(platform: Running, asked: Asked) -> None:
    for url, token, says in (
        ("http://127.0.0.1:1", TOKEN, "does not answer"),
        (asked.url, "another", "refuses this gateway's token"),
    ):
        with platform.gateway(STREAM_GW_TELEMETRY_URL=url, STREAM_GW_TELEMETRY_TOKEN=token) as process:
            reply = await Gate(process.facts["url"], process.pid, platform.key).ask("GET", PATH)
            assert reply.status == 503
            assert says in reply.json["error"]["message"]
            assert token not in reply.json["error"]["message"]
