"""Changes of tenants, keys, plans and prices: what they publish, and what they leave in the audit."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from sqlalchemy import text

from stream_fabric.accounts.records import (
    KeyRecord,
    Limits,
    PlanRecord,
    Price,
    PricesRecord,
    TenantRecord,
    decode_record,
)
from stream_fabric.errors import BadRequest, NotFound
from stream_fabric.events import Prices
from stream_gw.auth.peppered import peppered_digest
from stream_gw.tenancy import Conflict
from stream_gw.tenancy.models import (
    AuditFilter,
    KeyCreate,
    NewKey,
    Plan,
    PlanChange,
    TenantChange,
    TenantCreate,
    UserCreate,
)
from stream_gw.tenancy.tenancy import Tenancy
from tests.support.memory_tenants import MemoryTenants
from tests.tenancy.conftest import PEPPER, Opener

ME = "cli:tester"


def published(records: MemoryTenants, name: str) -> object:
    """The record under this name; None: it is deleted."""
    record = records.records[name][1]
    return decode_record(name, record) if record else None


async def make_key(tenancy: Tenancy, tenant: str = "acme", **more: object) -> NewKey:
    async with tenancy.change(ME) as session:
        return await session.keys.create(KeyCreate(tenant, **more))  # type: ignore[arg-type]


async def make_tenant(tenancy: Tenancy, tenant: str = "acme", **more: object) -> None:
    async with tenancy.change(ME) as session:
        await session.tenants.create(TenantCreate(tenant, **more))  # type: ignore[arg-type]


async def test_every_change_is_published_at_once(tenancy: Tenancy, records: MemoryTenants) -> None:
    await make_tenant(tenancy, prices={"m": Price(100, 200)})
    assert published(records, "plan:default") == PlanRecord("default")
    assert published(records, "tenant:acme") == TenantRecord("acme", "default", prices={"m": Prices(100, 100, 200)})
    key = await make_key(
        tenancy, label="ci", scopes=("read", "create"), models=("m",), user="u", limits=Limits(streams=3)
    )
    (record,) = published(records, "tenant:acme").keys  # type: ignore[attr-defined]
    digest = peppered_digest(key.key, PEPPER.encode())
    assert record == KeyRecord(key.id, digest, ("create", "read"), ("m",), "u", 0, None, Limits(streams=3))
    async with tenancy.change(ME) as session:
        await session.plans.create(Plan("gold", models=("m",), tenant=Limits(tokens_per_min=5)))
        await session.tenants.change("acme", TenantChange(plan="gold", suspended=True))
        await session.prices.set("*", Price(1, 2, 0))
    assert published(records, "plan:gold") == PlanRecord("gold", models=("m",), tenant=Limits(tokens_per_min=5))
    assert published(records, "tenant:acme").suspended  # type: ignore[attr-defined]
    assert published(records, "prices") == PricesRecord({"*": Prices(1, 0, 2)})
    revisions = sorted(revision for revision, _ in records.records.values())
    assert len(set(revisions)) == len(revisions), "each record has a revision of its own"


async def test_a_change_that_fails_leaves_nothing(tenancy: Tenancy, records: MemoryTenants) -> None:
    await make_tenant(tenancy)
    before = dict(records.records)
    with pytest.raises(Conflict):
        async with tenancy.change(ME) as session:
            await session.tenants.create(TenantCreate("other"))
            await session.tenants.create(TenantCreate("acme"))
    assert records.records == before
    async with tenancy.read() as session:
        assert [tenant.id for tenant in await session.tenants.page()] == ["acme"]
        assert len(await session.audit.page(AuditFilter())) == 1


async def test_what_does_not_exist_is_not_found(tenancy: Tenancy) -> None:
    for attempt in (
        lambda s: s.tenants.create(TenantCreate("a", plan="none")),
        lambda s: s.tenants.change("none", TenantChange(suspended=True)),
        lambda s: s.tenants.delete("none"),
        lambda s: s.keys.create(KeyCreate("none")),
        lambda s: s.keys.revoke("none"),
        lambda s: s.keys.rotate("none", 1),
        lambda s: s.plans.change("none", PlanChange(tier="batch")),
        lambda s: s.plans.delete("none"),
    ):
        with pytest.raises(NotFound, match="stream-gw"):
            async with tenancy.change(ME) as session:
                await attempt(session)  # type: ignore[no-untyped-call]


# --- keys ------------------------------------------------------------------------------------------------------


async def test_a_key_is_shown_once_and_is_nowhere_else(
    tenancy: Tenancy, records: MemoryTenants, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await make_tenant(tenancy)
    key = await make_key(tenancy)
    async with tenancy.change(ME) as session:
        rotated = await session.keys.rotate(key.id, 60)
    for made in (key, rotated):
        prefix, id_, secret = made.key.split("_", 2)
        assert (prefix, id_, made.shown) == ("sgw", made.id, f"sgw_{made.id}")
        assert len(id_) == 12 and id_.isalnum() and len(secret) == 43
        async with tenancy.database.transaction() as connection:
            for table in ("api_keys", "audit", "tenants"):
                rows = (await connection.execute(text(f"SELECT * FROM {table}"))).all()
                assert secret not in str(rows)
                if table == "audit":
                    assert peppered_digest(made.key, PEPPER.encode()) not in str(rows)
        assert secret not in caplog.text and secret not in str(records.records)
        async with tenancy.read() as session:
            assert secret not in msgspec.json.encode(await session.keys.find(made.id)).decode()


async def test_a_rotated_key_stays_valid_for_its_grace(tenancy: Tenancy, records: MemoryTenants) -> None:
    await make_tenant(tenancy)
    old = await make_key(tenancy, label="ci", models=("m",), expires_in_s=1000)
    async with tenancy.change(ME) as session:
        new = await session.keys.rotate(old.id, 60)
        kept = await session.keys.find(old.id)
    assert (new.label, new.models, new.expires_at) == ("ci", ("m",), old.expires_at)
    assert kept.expires_at is not None and 0 < kept.expires_at - old.created_at < 120
    assert {key.id for key in published(records, "tenant:acme").keys} == {old.id, new.id}  # type: ignore[attr-defined]
    async with tenancy.change(ME) as session:
        newest = await session.keys.rotate(new.id, 5000)
        assert (await session.keys.find(new.id)).expires_at == old.expires_at, "a rotation never prolongs a key"
        await session.keys.rotate(newest.id, 0)
    with pytest.raises(Conflict, match="expired"):
        async with tenancy.change(ME) as session:
            await session.keys.rotate(newest.id, 60)


async def test_a_revoked_key_leaves_the_record(tenancy: Tenancy, records: MemoryTenants) -> None:
    await make_tenant(tenancy)
    key = await make_key(tenancy)
    async with tenancy.change(ME) as session:
        assert (await session.keys.end_tokens(key.id)).generation == 1
    assert published(records, "tenant:acme").keys[0].generation == 1  # type: ignore[attr-defined]
    async with tenancy.change(ME) as session:
        await session.keys.revoke(key.id)
    assert published(records, "tenant:acme") == TenantRecord("acme", "default")
    with pytest.raises(Conflict, match="revoked"):
        async with tenancy.change(ME) as session:
            await session.keys.revoke(key.id)
    async with tenancy.read() as session:
        assert await session.keys.page("acme") == []
        assert [each.id for each in await session.keys.page("acme", revoked=True)] == [key.id]


async def test_no_key_is_made_without_a_pepper(tenancy: Tenancy, open_database: Opener) -> None:
    await make_tenant(tenancy)
    async with open_database(None, pepper="") as unpeppered:
        with pytest.raises(BadRequest, match="STREAM_GW_KEY_PEPPER"):
            await make_key(unpeppered)


async def test_a_tenant_has_a_limit_of_keys(tenancy: Tenancy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_gw.tenancy.sql.keys.TENANT_KEYS_MAX", 2)
    await make_tenant(tenancy)
    first = await make_key(tenancy)
    await make_key(tenancy)
    with pytest.raises(Conflict, match="2 keys"):
        await make_key(tenancy)
    async with tenancy.change(ME) as session:
        await session.keys.revoke(first.id)
    await make_key(tenancy)


# --- deleted rows ------------------------------------------------------------------------------------------------


async def test_a_deleted_tenant_is_published_as_deleted_and_may_come_back(
    tenancy: Tenancy, records: MemoryTenants
) -> None:
    await make_tenant(tenancy, label="first")
    key = await make_key(tenancy)
    async with tenancy.change(ME) as session:
        await session.tenants.delete("acme")
    assert published(records, "tenant:acme") is None
    async with tenancy.read() as session:
        with pytest.raises(NotFound):
            await session.tenants.find("acme")
        assert await session.tenants.page() == []
    await make_tenant(tenancy, label="second")
    assert published(records, "tenant:acme") == TenantRecord("acme", "default"), "its old keys stay revoked"
    async with tenancy.read() as session:
        assert (await session.tenants.find("acme")).label == "second"
        assert (await session.keys.find(key.id)).revoked_at is not None


async def test_a_plan_is_deleted_once_no_tenant_is_on_it(tenancy: Tenancy, records: MemoryTenants) -> None:
    async with tenancy.change(ME) as session:
        await session.plans.create(Plan("gold", tier="batch"))
        await session.tenants.create(TenantCreate("acme", plan="gold"))
    with pytest.raises(Conflict, match="1 tenants"):
        async with tenancy.change(ME) as session:
            await session.plans.delete("gold")
    async with tenancy.change(ME) as session:
        await session.tenants.delete("acme")
        await session.plans.delete("gold")
    assert published(records, "plan:gold") is None
    async with tenancy.change(ME) as session:
        await session.plans.create(Plan("gold", finish_revoked=True))
    assert published(records, "plan:gold") == PlanRecord("gold", finish_revoked=True)


# --- the audit ---------------------------------------------------------------------------------------------------


async def test_the_audit_has_who_changed_what(tenancy: Tenancy) -> None:
    await make_tenant(tenancy)
    key = await make_key(tenancy)
    async with tenancy.change("boss") as session:
        await session.tenants.change("acme", TenantChange(label="Acme"))
        await session.prices.set("m", Price(1, 1))
        await session.prices.set("m", Price(1, 1))
    async with tenancy.read() as session:
        events = await session.audit.page(AuditFilter())
        assert [(event.who, event.action, event.subject) for event in events] == [
            ("boss", "price.set", "price:m"),
            ("boss", "tenant.change", "tenant:acme"),
            (ME, "key.create", f"key:{key.id}"),
            (ME, "tenant.create", "tenant:acme"),
        ]
        assert (events[1].before["label"], events[1].after["label"]) == ("", "Acme")
        assert events[3].before is None and events[2].after["shown"] == key.shown
        assert await session.audit.page(AuditFilter(who="boss"), limit=1) == events[:1]
        assert await session.audit.page(AuditFilter(who="boss"), after=events[0].id) == events[1:2]
        assert await session.audit.page(AuditFilter(subject="tenant:acme")) == [events[1], events[3]]
        assert await session.audit.page(AuditFilter(since=events[0].at + 1)) == []


async def test_the_audit_of_a_tenant_has_its_keys_and_users(tenancy: Tenancy) -> None:
    for tenant in ("acme", "a_me", "acme-2"):  # "_" is a pattern of LIKE
        await make_tenant(tenancy, tenant)
        key = await make_key(tenancy, tenant)
        async with tenancy.change("boss") as session:
            await session.users.create(UserCreate(tenant, "ann"))
            await session.keys.revoke(key.id)
    async with tenancy.read() as session:
        events = await session.audit.page(AuditFilter(tenant="a_me"))
        assert [event.action for event in events] == ["key.revoke", "user.create", "key.create", "tenant.create"]
        assert {event.subject for event in events} >= {"tenant:a_me", "user:a_me:ann"}
        assert await session.audit.page(AuditFilter(tenant="a_me", who="boss")) == events[:2]
        assert await session.audit.page(AuditFilter(tenant="nobody")) == []


# --- many writers --------------------------------------------------------------------------------------------------


async def test_changes_of_many_writers_are_all_published_with_dense_revisions(
    tenancy: Tenancy, open_database: Opener, records: MemoryTenants
) -> None:
    async def write(number: int) -> None:
        async with open_database(records) as opened:
            own = opened if number % 2 else tenancy  # processes of their own, and requests of one gateway
            await make_tenant(own, f"t{number}")
            for _ in range(3):
                await make_key(own, f"t{number}")
            async with own.change(ME) as session:
                await session.tenants.change("t0", TenantChange(label=str(number)))

    await make_tenant(tenancy, "t0")
    await asyncio.gather(*(write(number) for number in range(1, 9)))
    async with tenancy.database.transaction() as connection:
        last = (await connection.execute(text("SELECT revision FROM revisions WHERE name = 'last'"))).scalar_one()
        rows = dict((await connection.execute(text("SELECT id, revision FROM tenants"))).all())  # type: ignore[arg-type]
    assert last == 1 + 1 + 8 * 5, "each change takes the next revision"
    assert {name: revision for name, (revision, _) in records.records.items() if name.startswith("tenant")} == {
        f"tenant:{tenant}": revision for tenant, revision in rows.items()
    }
    assert await records.revision() == last
    for number in range(1, 9):
        assert len(published(records, f"tenant:t{number}").keys) == 3  # type: ignore[attr-defined]
