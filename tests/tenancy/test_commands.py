"""``stream-gw tenants``, ``keys``, ``plans``, ``prices`` and ``audit`` on SQLite and a real Redis."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stream_fabric.accounts.records import (
    Budget,
    Budgets,
    Limits,
    PlanRecord,
    PricesRecord,
    TenantRecord,
    UserRecord,
    decode_record,
)
from stream_fabric.events import Prices
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy.tenants import RedisTenants
from stream_gw.auth import key_digest
from stream_gw.auth.peppered import peppered_digest
from stream_gw.cli.main import main
from stream_gw.cli.tenancy.session import moment_text
from stream_gw.tenancy.sql.schema import known_version
from tests.support.redis import RedisServer
from tests.tenancy.conftest import PEPPER

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, server: RedisServer
) -> Run:
    """The command in this process: its exit code, stdout and stderr."""
    for name in os.environ:
        if name.startswith("STREAM_GW_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("STREAM_GW_DATABASE_URL", f"sqlite:///{tmp_path / 'tenants.db'}")
    monkeypatch.setenv("STREAM_GW_REDIS_URL", server.url)
    monkeypatch.setenv("STREAM_GW_KEY_PEPPER", PEPPER)
    server("FLUSHALL")

    def run_(*flags: str, **env: str) -> tuple[int, str, str]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        try:
            code = main(list(flags))
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run_


def ok(done: tuple[int, str, str]) -> str:
    code, out, err = done
    assert code == 0 and not err, (out, err)
    return out


def published(server: RedisServer) -> dict[str, Any]:
    async def read() -> dict[str, Any]:
        client = RedisClient(server.url)
        await client.start()
        try:
            _, found = await RedisTenants(client).changes(0)
        finally:
            await client.close()
        return {name: decode_record(name, record) if record else None for name, record in found.items()}

    return asyncio.run(read())


def test_a_tenant_with_a_plan_keys_and_prices(run: Run, server: RedisServer) -> None:
    ok(run("plans", "add", "gold", "--tier", "standard", "--models", "a,b", "--tenant-tokens-per-min", "900",
           "--key-streams", "2", "--model-limits", "a:streams=1", "--trace-content-bytes", "10",
           "--kv-isolation", "--budget", "tenant_month:tokens=9,micro=8", "--share", "50", "--fallback", "a:b",
           "--regions", "eu", "--retention-s", "60", "--trace-retention-days", "3", "--response-days", "9", "--redact",
           "--moderation", "all", "--repairs", "2"))  # fmt: skip
    assert "keys add --tenant acme" in ok(run("tenants", "add", "acme", "--plan", "gold", "--label", "Acme Inc."))
    key = json.loads(
        ok(
            run(
                "keys",
                "add",
                "--tenant",
                "acme",
                "--scope",
                "read",
                "--regions",
                "eu,us",
                "--expires-days",
                "1",
                "--json",
            )
        )
    )
    ok(run("prices", "set", "*", "--prompt", "5", "--output", "7"))
    ok(run("prices", "set", "a", "--prompt", "5", "--output", "7", "--cached", "1", "--tenant", "acme"))
    found = published(server)
    assert found["plan:gold"] == PlanRecord(
        "gold", "standard", ("a", "b"), Limits(tokens_per_min=900), Limits(streams=2), model={"a": Limits(streams=1)},
        trace_content_bytes=10, kv_isolation=True, budgets=Budgets(tenant_month=Budget(9, 8)), share=50,
        fallbacks={"a": ("b",)}, regions=("eu",), retention_s=60, trace_retention_days=3, redact=True, moderation="all",
        repairs=2, response_days=9,
    )  # fmt: skip
    assert found["prices"] == PricesRecord({"*": Prices(5, 5, 7)})
    tenant = found["tenant:acme"]
    assert isinstance(tenant, TenantRecord)
    assert (tenant.plan, tenant.prices) == ("gold", {"a": Prices(5, 1, 7)})
    assert tenant.keys[0].digest == peppered_digest(key["key"], PEPPER.encode()) and tenant.keys[0].scopes == ("read",)
    assert tenant.keys[0].regions == ("eu", "us")
    shown = ok(run("tenants", "show", "acme"))
    assert "900 tokens/min" in shown and key["id"] in shown and "Acme Inc." in shown and key["key"] not in shown
    for line in (
        ok(run("tenants", "list")),
        ok(run("keys", "list")),
        ok(run("plans", "list")),
        ok(run("plans", "show", "gold")),
    ):
        assert "gold" in line or "acme" in line
        assert all(len(each) <= 200 for each in line.splitlines())
    assert "7" in ok(run("prices", "list")) and "1" in ok(run("prices", "list", "--tenant", "acme"))


def test_a_plan_that_keeps_nothing_stores_no_content(run: Run, server: RedisServer) -> None:
    ok(run("plans", "add", "gold", "--trace-content-bytes", "10"))
    for command in (("set", "gold"), ("add", "silver", "--trace-content-bytes", "10")):
        code, _, err = run("plans", *command, "--retention-s", "0")
        assert code != 0
        assert "trace_content_bytes" in err
    ok(run("plans", "set", "gold", "--retention-s", "0", "--trace-content-bytes", "0"))
    assert published(server)["plan:gold"] == PlanRecord("gold", retention_s=0)


def test_changes_of_a_plan_keep_what_is_not_given(run: Run, server: RedisServer) -> None:
    ok(run("plans", "add", "gold", "--tenant-streams", "5", "--tenant-requests-per-min", "9", "--models", "a"))
    ok(run("plans", "set", "gold", "--tenant-streams", "none", "--finish-revoked", "--model-limits", "m:streams=3",
           "--budget", "session:tokens=5", "--budget", "request:micro=6"))  # fmt: skip
    expected = PlanRecord("gold", models=("a",), tenant=Limits(9), model={"m": Limits(streams=3)}, finish_revoked=True,
                           budgets=Budgets(Budget(None, 6), Budget(5)))  # fmt: skip
    assert published(server)["plan:gold"] == expected
    ok(run("plans", "set", "gold", "--models", "all", "--model-limits", "m:", "--no-finish-revoked",
           "--budget", "session:", "--budget", "request:"))  # fmt: skip
    assert published(server)["plan:gold"] == PlanRecord("gold", tenant=Limits(9))
    ok(run("plans", "delete", "gold"))
    assert published(server)["plan:gold"] is None


def test_suspend_resume_rotate_revoke_delete(run: Run, server: RedisServer) -> None:
    ok(run("tenants", "add", "acme"))
    ok(run("tenants", "suspend", "acme"))
    assert published(server)["tenant:acme"].suspended
    ok(run("tenants", "resume", "acme"))
    ok(run("tenants", "set", "acme", "--label", "x"))
    assert not published(server)["tenant:acme"].suspended
    old = json.loads(ok(run("keys", "add", "--tenant", "acme", "--json")))
    new = json.loads(ok(run("keys", "rotate", old["id"], "--grace-s", "60", "--json")))
    by_id = {key.id: key for key in published(server)["tenant:acme"].keys}
    assert by_id[old["id"]].expires_at and by_id[new["id"]].expires_at is None
    assert "shown once" in ok(run("keys", "rotate", f"sgw_{new['id']}"))
    ok(run("keys", "revoke", new["id"], "--tokens-only"))
    ok(run("keys", "revoke", old["id"]))
    assert old["id"] not in {key.id for key in published(server)["tenant:acme"].keys}
    assert old["id"] not in ok(run("keys", "list")) and "revoked" in ok(run("keys", "list", "--revoked"))
    ok(run("tenants", "delete", "acme"))
    assert published(server)["tenant:acme"] is None
    events = json.loads(ok(run("audit", "--json", "--since", "1h")))
    assert [event["action"] for event in events][:3] == ["tenant.delete", "key.revoke", "key.end_tokens"]
    assert all(event["who"].startswith("cli:") for event in events)
    assert "suspended: false -> true" in ok(run("audit", "--subject", "tenant:acme"))
    assert ok(run("audit", "--who", "nobody")) == "no change in this time\n"


@pytest.mark.parametrize("verb", ["add", "set"])
def test_a_key_and_a_user_may_have_no_limits_where_the_plan_has_some(run: Run, verb: str) -> None:
    plan = ("--key-requests-per-min", "5", "--user-requests-per-min", "5")
    ok(run("plans", "add", "team", *plan))
    ok(run("tenants", "add", "acme", "--plan", "team"))
    free = ("--requests-per-min", "none", "--json")
    for flags in (["keys", "add", "--tenant", "acme"], ["users", "add", "ann", "--tenant", "acme"]):
        made = json.loads(ok(run(*flags, *(free if verb == "add" else ["--json"]))))
        if verb == "set":
            assert made["limits"] is None
            ids = [made["id"]] if flags[0] == "keys" else ["ann", "--tenant", "acme"]
            made = json.loads(ok(run(flags[0], "set", *ids, *free)))
        assert made["limits"] == {}


def test_a_change_of_nothing_changes_nothing(run: Run) -> None:
    ok(run("tenants", "add", "acme"))
    key = json.loads(ok(run("keys", "add", "--tenant", "acme", "--json")))["id"]
    assert f"changed key {key}" in ok(run("keys", "set", key))
    assert "key.create" in ok(run("audit", "--subject", f"key:{key}", "--limit", "1"))


def test_the_audit_names_each_value_that_changed(run: Run) -> None:
    budgets = ("--budget", "tenant_hour:tokens=50000000,micro=2000000000", "--budget", "tenant_month:micro=50000000")
    ok(run("plans", "add", "team", "--tenant-requests-per-min", "600", "--tenant-streams", "50", *budgets))
    ok(run("plans", "set", "team", "--tenant-streams", "60", "--budget", "tenant_month:micro=60000000"))
    ok(run("tenants", "add", "acme", "--plan", "team"))
    key = json.loads(ok(run("keys", "add", "--tenant", "acme", "--expires-days", "30", "--json")))

    def newest(subject: str) -> list[str]:
        _, *lines = ok(run("audit", "--limit", "1", "--subject", subject)).splitlines()
        return [line.strip() for line in lines]

    assert newest("plan:team") == [
        "tenant.streams: 50 -> 60", "budgets.tenant_month.micro: 50000000 -> 60000000"
    ]  # fmt: skip
    assert f"expires_at: none -> {moment_text(key['expires_at'])}" in newest(f"key:{key['id']}")
    for flags, lines in (
        (["--streams", "none"], ["limits: none -> {}"]),
        (["--streams", "5"], ["limits.streams: none -> 5"]),
        (["--plan-limits"], ["limits.streams: 5 -> none"]),
    ):
        ok(run("keys", "set", key["id"], *flags))
        assert newest(f"key:{key['id']}") == lines


def test_users_and_keys_are_changed(run: Run, server: RedisServer) -> None:
    ok(run("tenants", "add", "acme"))
    assert "no user" in ok(run("users", "list", "--tenant", "acme"))
    ok(run("users", "add", "ann", "--tenant", "acme", "--streams", "2", "--label", "Ann"))
    assert "suspended" in ok(run("users", "set", "ann", "--tenant", "acme", "--suspended", "--requests-per-min", "5"))
    assert published(server)["user:acme:ann"] == UserRecord("acme", "ann", True, Limits(5, streams=2))
    assert "Ann" in ok(run("users", "show", "ann", "--tenant", "acme"))
    ok(run("users", "set", "ann", "--tenant", "acme", "--no-suspended", "--plan-limits"))
    assert published(server)["user:acme:ann"] == UserRecord("acme", "ann")
    assert "of the plan" in ok(run("users", "list", "--tenant", "acme"))
    ok(run("users", "delete", "ann", "--tenant", "acme"))
    assert published(server)["user:acme:ann"] is None
    key = json.loads(ok(run("keys", "add", "--tenant", "acme", "--models", "m", "--json")))
    shown = ok(run("keys", "set", key["id"], "--label", "ci", "--streams", "3", "--expires-days", "2",
                   "--regions", "eu", "--scope", "read"))  # fmt: skip
    assert "ci" in shown and "3 streams" in shown and "current" in shown
    (record,) = published(server)["tenant:acme"].keys
    assert (record.models, record.limits, record.regions, record.scopes) == (
        ("m",), Limits(streams=3), ("eu",), ("read",)
    )  # fmt: skip
    assert record.expires_at
    ok(run("keys", "set", key["id"], "--models", "all", "--expires-days", "never", "--regions", "all", "--plan-limits"))
    (record,) = published(server)["tenant:acme"].keys
    assert (record.models, record.limits, record.regions, record.expires_at) == (None, None, None, None)


def test_a_keys_file_is_imported_once(run: Run, server: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        f"""
        [[tenant]]
        id = "acme"
        [[tenant.key]]
        sha256 = "{key_digest("sk-1")}"
        [[tenant.key]]
        sha256 = "{key_digest("sk-2").upper()}"
        scopes = ["admin"]
        [tenant.price."m"]
        prompt = 3
        [[tenant]]
        id = "globex"
        trace_content = true
        trace_content_bytes = 100
        [[tenant.key]]
        sha256 = "{key_digest("sk-3")}"
        models = ["m"]
        [price."*"]
        output = 5
        """
    )
    assert "added 2 tenants, 3 keys and 1 plans" in ok(run("tenants", "import", str(path)))
    found = published(server)
    assert found["tenant:acme"].plan == "default" and found["tenant:acme"].prices == {"m": Prices(3, 3, 0)}
    assert found[f"plan:{found['tenant:globex'].plan}"].trace_content_bytes == 100
    assert {key.digest for key in found["tenant:acme"].keys} == {
        f"sha256:{key_digest('sk-1')}",
        f"sha256:{key_digest('sk-2')}",
    }
    assert found["tenant:globex"].keys[0].models == ("m",)
    assert found["prices"] == PricesRecord({"*": Prices(0, 0, 5)})
    assert "added 0 tenants, 0 keys and 0 plans" in ok(run("tenants", "import", str(path)))
    assert published(server) == found, "nothing is published anew"
    key = found["tenant:acme"].keys[0].id
    ok(run("keys", "revoke", key))
    ok(run("tenants", "import", str(path)))
    assert key not in {each.id for each in published(server)["tenant:acme"].keys}, "a revoked key stays revoked"
    path.write_text(f'[[tenant]]\nid = "other"\n[[tenant.key]]\nsha256 = "{key_digest("sk-3")}"\n')
    code, _, err = run("tenants", "import", str(path))
    assert code == 1 and "globex" in err
    path.write_text('[[tenant]]\nid = "a b"\n')
    code, _, err = run("tenants", "import", str(path))
    assert code == 1 and "a name has" in err


def test_a_changed_keys_file_never_changes_plans_silently(run: Run, server: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"

    def write(streams: int, *tenants: str) -> None:
        named = "".join(f'[[tenant]]\nid = "{tenant}"\nplan = "team"\n' for tenant in tenants)
        path.write_text(f"{named}[plan.team]\ntenant = {{ streams = {streams} }}\n")

    write(5, "acme")
    assert "1 tenants, 0 keys and 1 plans" in ok(run("tenants", "import", str(path)))
    assert published(server)["plan:team"] == PlanRecord("team", tenant=Limits(streams=5)), "under its own name"
    write(5, "acme", "globex")
    assert "1 tenants, 0 keys and 0 plans" in ok(run("tenants", "import", str(path)))
    assert published(server)["tenant:globex"].plan == "team"
    write(6, "acme", "initech")
    code, _, err = run("tenants", "import", str(path))
    assert code == 1 and "plan 'team' exists and differs from the file's in tenant" in err and "plans set team" in err
    assert "tenant:initech" not in published(server)
    write(6, "acme")
    assert "keep their plan: acme" in ok(run("tenants", "import", str(path)))
    assert published(server)["plan:team"].tenant == Limits(streams=5)


def test_a_change_is_kept_while_redis_is_away(run: Run, server: RedisServer) -> None:
    code, out, err = run("tenants", "add", "acme", STREAM_GW_REDIS_URL="redis://127.0.0.1:1/0")
    assert code == 0 and "added tenant acme" in out
    assert "committed, not published" in err and "once Redis is back" in err
    ok(run("tenants", "list"))
    ok(run("tenants", "add", "other", STREAM_GW_REDIS_URL=server.url))
    assert {"tenant:acme", "tenant:other"} <= published(server).keys()
    assert "deleted 0" in ok(run("tenants", "republish"))


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["tenants", "add", "a b"], 2, "a name has"),
        (["tenants", "add", "a", "--plan", "none"], 1, "no plan 'none'"),
        (["tenants", "show", "none"], 1, "no tenant 'none'"),
        (["tenants", "import", "/nowhere.toml"], 1, "/nowhere.toml"),
        (["keys", "add", "--tenant", "none"], 1, "no tenant 'none'"),
        (["keys", "revoke", "none"], 1, "no key 'none'"),
        (["keys", "set", "none", "--label", "x"], 1, "no key 'none'"),
        (["users", "set", "ann", "--tenant", "none"], 1, "users add"),
        (["users", "add", "ann"], 2, "--tenant"),
        (["keys", "rotate", "none", "--grace-s", "-1"], 2, "must be 0 to"),
        (["keys", "add", "--tenant", "a", "--expires-days", "0"], 2, "at most 7300 days"),
        (["plans", "add", "p", "--tenant-streams", "many"], 2, "must be a number or none"),
        (["plans", "add", "p", "--model-limits", "m"], 2, "MODEL:NAME=N"),
        (["plans", "add", "p", "--trace-content-bytes", "-1"], 2, "must be 0 to 65536 bytes"),
        (["plans", "delete", "none"], 1, "no plan 'none'"),
        (["prices", "set", "m", "--prompt", "x", "--output", "1"], 2, "whole number"),
        (["audit", "--since", "yesterday"], 2, "is no time"),
        (["tenants"], 2, "VERB"),
    ],
)
def test_errors_say_what_to_do(run: Run, flags: list[str], code: int, says: str) -> None:
    found, _, err = run(*flags)
    assert (found, says in err) == (code, True), err


def test_without_a_database_or_a_pepper_the_setting_is_named(run: Run) -> None:
    code, _, err = run("tenants", "list", STREAM_GW_DATABASE_URL="")
    assert code == 1 and "STREAM_GW_DATABASE_URL" in err


def test_no_key_is_made_without_a_pepper(run: Run) -> None:
    ok(run("tenants", "add", "acme"))
    code, _, err = run("keys", "add", "--tenant", "acme", STREAM_GW_KEY_PEPPER="")
    assert code == 1 and "STREAM_GW_KEY_PEPPER" in err


def test_a_key_of_another_pepper_than_the_fleets_comes_with_a_warning(run: Run) -> None:
    other = "another pepper of sixteen bytes"
    ok(run("tenants", "add", "acme"))
    key = json.loads(ok(run("keys", "add", "--tenant", "acme", "--json")))["id"]
    for verb in (("add", "--tenant", "acme"), ("rotate", key)):
        code, out, err = run("keys", *verb, "--json", STREAM_GW_KEY_PEPPER=other)
        made = json.loads(out)["id"]
        assert code == 0 and "1 valid keys have another pepper" in err and f"revoke {made}" in err
        ok(run("keys", "revoke", made))
    code, _, err = run("keys", "rotate", key, STREAM_GW_KEY_PEPPER=other, STREAM_GW_KEY_PEPPER_PREVIOUS=PEPPER)
    assert (code, err) == (0, "")


def test_migrate_tells_the_version(run: Run) -> None:
    assert json.loads(ok(run("tenants", "migrate", "--json"))) == {"before": 0, "version": known_version()}
    assert f"version {known_version()}" in ok(run("tenants", "migrate"))
