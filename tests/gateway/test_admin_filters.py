"""Filters of an operator's queries, through a gateway: one tenant's rows are one tenant's, and text is never SQL."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

import pytest

from stream_fabric.events import RequestTrace
from tests.gateway.processes import Running
from tests.gateway.wire import Gate
from tests.support.keys_file import operator_and_tenant
from tests.telemetry.asked import TOKEN, Asked
from tests.telemetry.fleet import HOUR_US, START_US, fleet

pytestmark = pytest.mark.platform

PATH = "/v1/admin/traces"
HOUR = {"since": "2026-11-20T10:00:00Z", "until": "2026-11-20T11:00:00Z"}
QUERIES = ("", "/slow", "/queries/series", "/queries/series_of_tenant", "/queries/filters", "/queries/coverage")
HOSTILE = ("' OR 1=1 -- ", "acme' UNION ALL SELECT * FROM requests -- ", "\\", "<script>", "a\u0000b", "ä" * 200)


@pytest.fixture(scope="module")
def gates(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gate, Gate]]:
    """The gateway with an operator's key, and with the key of tenant acme, whose requests telemetry has."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    operator, tenant = operator_and_tenant(path, "acme")
    with Asked() as asked:
        env = {
            "STREAM_GW_KEYS_FILE": str(path), "STREAM_GW_TELEMETRY_URL": asked.url, "STREAM_GW_TELEMETRY_TOKEN": TOKEN,
            "STREAM_GW_TOKEN_SECRET": "0123456789abcdef",
        }  # fmt: skip
        with platform.gateway(**env) as process:
            yield Gate(process.facts["url"], process.pid, operator), Gate(process.facts["url"], process.pid, tenant)


def counted(**of: str) -> int:
    return sum(
        START_US <= row.at_us < START_US + HOUR_US and all(getattr(row, name) == value for name, value in of.items())
        for row in fleet().of(RequestTrace)
    )


@pytest.mark.parametrize("tenant", ["acme", "globex", "initech"])
async def test_a_tenant_filter_gives_that_tenants_rows_and_all_of_them(gates: tuple[Gate, Gate], tenant: str) -> None:
    for rest in ("", "/slow"):
        reply = await gates[0].ask("GET", f"{PATH}{rest}?{urlencode({**HOUR, 'tenant': tenant, 'top': 1000})}")
        assert {row["tenant"] for row in reply.json} == {tenant}
        assert len(reply.json) == counted(tenant=tenant)
        more = {**HOUR, "tenant": tenant, "ended": "failed", "model": "llama-70b", "top": 1000}
        reply = await gates[0].ask("GET", f"{PATH}{rest}?{urlencode(more)}")
        assert len(reply.json) == counted(tenant=tenant, ended="failed", model="llama-70b")
    reply = await gates[0].ask("GET", f"{PATH}/queries/series_of_tenant?{urlencode({**HOUR, 'tenant': tenant})}")
    of_pools = sum(row["requests"] for row in reply.json if row["part"] == "pool")
    assert of_pools == counted(tenant=tenant, role="created") + counted(tenant=tenant, role="refused")


@pytest.mark.parametrize("rest", QUERIES)
async def test_a_tenant_asks_for_nobodys_not_even_its_own(gates: tuple[Gate, Gate], rest: str) -> None:
    for tenant in ("acme", "globex"):
        reply = await gates[1].ask("GET", f"{PATH}{rest}?{urlencode({**HOUR, 'tenant': tenant})}")
        assert (reply.status, reply.json["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_a_hostile_filter_finds_nothing(gates: tuple[Gate, Gate], hostile: str) -> None:
    for rest in ("", "/slow"):
        for name in ("tenant", "model", "ended"):
            reply = await gates[0].ask("GET", f"{PATH}{rest}?{urlencode({**HOUR, name: hostile})}")
            assert (reply.status, reply.json) == (200, []), name
    reply = await gates[0].ask("GET", f"{PATH}/queries/series_of_tenant?{urlencode({**HOUR, 'tenant': hostile})}")
    assert [(row["part"], row["requests"]) for row in reply.json] == [("all", 0)]


@pytest.mark.parametrize("given", [{"step_s": "60; DROP TABLE requests"}, {"step_s": "1.5"}, {"colour": "red"}])
async def test_what_is_no_filter_is_400(gates: tuple[Gate, Gate], given: dict[str, str]) -> None:
    reply = await gates[0].ask("GET", f"{PATH}/queries/series?{urlencode({**HOUR, **given})}")
    assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_request")
