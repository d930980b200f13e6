"""Users with settings of their own, changed keys, and keys of two peppers: rows, published records and the audit."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from stream_fabric.accounts.records import Limits, UserRecord
from stream_fabric.errors import NotFound
from stream_gw.auth import KeyStore, TenantFeed
from stream_gw.tenancy import Conflict
from stream_gw.tenancy.models import AuditFilter, KeyChange, TenantUser, UserChange, UserCreate
from stream_gw.tenancy.tenancy import Tenancy
from tests.support.memory_tenants import MemoryTenants
from tests.tenancy.conftest import PEPPER, Opener
from tests.tenancy.test_changes import ME, make_key, make_tenant, published

OTHER = "another pepper of many bytes"


async def make_user(tenancy: Tenancy, user: str = "ann", **more: object) -> TenantUser:
    async with tenancy.change(ME) as session:
        return await session.users.create(UserCreate("acme", user, **more))  # type: ignore[arg-type]


# --- users -----------------------------------------------------------------------------------------------------------


async def test_a_user_is_a_record_of_its_own(tenancy: Tenancy, records: MemoryTenants) -> None:
    await make_tenant(tenancy)
    before = records.records["tenant:acme"]
    await make_user(tenancy, "ann:o'n/e", label="Ann", limits=Limits(streams=2))
    assert published(records, "user:acme:ann:o'n/e") == UserRecord("acme", "ann:o'n/e", limits=Limits(streams=2))
    async with tenancy.change(ME) as session:
        changed = await session.users.change("acme", "ann:o'n/e", UserChange(suspended=True, limits=None))
    assert (changed.label, changed.suspended, changed.limits) == ("Ann", True, None)
    assert published(records, "user:acme:ann:o'n/e") == UserRecord("acme", "ann:o'n/e", suspended=True)
    async with tenancy.change(ME) as session:
        await session.users.delete("acme", "ann:o'n/e")
    assert published(records, "user:acme:ann:o'n/e") is None
    assert records.records["tenant:acme"] == before, "the tenant's record was not published again"
    await make_user(tenancy, "ann:o'n/e")
    assert published(records, "user:acme:ann:o'n/e") == UserRecord("acme", "ann:o'n/e")
    async with tenancy.read() as session:
        events = await session.audit.page(AuditFilter(subject="user:acme:ann:o'n/e"))
        assert [event.action for event in events] == ["user.create", "user.delete", "user.change", "user.create"]
        assert (events[2].before["suspended"], events[2].after["suspended"]) == (False, True)


async def test_what_a_user_needs(tenancy: Tenancy) -> None:
    await make_tenant(tenancy)
    await make_user(tenancy)
    with pytest.raises(Conflict, match="users set"):
        await make_user(tenancy)
    for tenant, user in (("acme", "bob"), ("none", "ann")):
        async with tenancy.read() as session:
            with pytest.raises(NotFound, match="users add"):
                await session.users.find(tenant, user)
    async with tenancy.read() as session:
        with pytest.raises(NotFound, match="no tenant 'none'"):
            await session.users.page("none")


async def test_users_end_with_their_tenant(tenancy: Tenancy, records: MemoryTenants) -> None:
    await make_tenant(tenancy)
    for user in ("ann", "bob", "cid"):
        await make_user(tenancy, user, suspended=True)
    async with tenancy.read() as session:
        assert [user.id for user in await session.users.page("acme", "ann", 1)] == ["bob"]
    async with tenancy.change(ME) as session:
        await session.tenants.delete("acme")
    assert {published(records, f"user:acme:{user}") for user in ("ann", "bob", "cid")} == {None}
    revisions = sorted(revision for revision, _ in records.records.values())
    assert len(set(revisions)) == len(revisions), "each record has a revision of its own"
    await make_tenant(tenancy)
    async with tenancy.read() as session:
        assert await session.users.page("acme") == []


async def test_republish_replaces_users(tenancy: Tenancy, records: MemoryTenants) -> None:
    await make_tenant(tenancy)
    await make_user(tenancy)
    await records.publish({"user:acme:lost": (50, b'{"tenant":"acme","id":"lost"}')})
    assert await tenancy.republish(ME) == 1
    assert published(records, "user:acme:lost") is None
    assert published(records, "user:acme:ann") == UserRecord("acme", "ann")
    assert records.records["user:acme:ann"][0] > 50


async def test_many_users_are_published_in_pages_and_one_change_is_one_record(
    tenancy: Tenancy, records: MemoryTenants
) -> None:
    await make_tenant(tenancy)
    await add_rows(tenancy, 1000)
    await make_user(tenancy, "last")
    assert len(records.records) == 1003, "with the plan and the tenant"
    before = await records.revision()
    await make_user(tenancy, "later", suspended=True)
    _, changed = await records.changes(before)
    assert changed.keys() == {"user:acme:later"}


async def add_rows(tenancy: Tenancy, count: int) -> None:
    """Add users that no process has published yet."""
    async with tenancy.database.transaction() as connection:
        await connection.execute(
            text(
                "INSERT INTO users (tenant, id, label, suspended, created_at, created_by, revision) "
                "VALUES ('acme', :id, '', false, 0, 'test', :revision)"
            ),
            [{"id": f"u{number}", "revision": 3 + number} for number in range(count)],
        )
        await connection.execute(text(f"UPDATE revisions SET revision = {count + 2} WHERE name = 'last'"))


# --- changed keys --------------------------------------------------------------------------------------------------


async def test_a_key_changes_in_place(tenancy: Tenancy, records: MemoryTenants) -> None:
    await make_tenant(tenancy)
    key = await make_key(tenancy, label="ci", models=("m",), expires_in_s=100)
    async with tenancy.change(ME) as session:
        changed = await session.keys.change(
            key.id,
            KeyChange(label="cd", scopes=("read", "create"), models=None, limits=Limits(streams=1), regions=("eu",)),
        )
    assert (changed.label, changed.scopes, changed.models) == ("cd", ("create", "read"), None)
    assert changed.expires_at == key.expires_at and changed.generation == 0
    (record,) = published(records, "tenant:acme").keys  # type: ignore[attr-defined]
    assert (record.scopes, record.models, record.limits, record.regions) == (
        ("create", "read"), None, Limits(streams=1), ("eu",)
    )  # fmt: skip
    async with tenancy.change(ME) as session:
        changed = await session.keys.change(key.id, KeyChange(expires_in_s=None, limits=None))
    assert (changed.expires_at, changed.limits, changed.label) == (None, None, "cd")
    async with tenancy.read() as session:
        event, *_ = await session.audit.page(AuditFilter(subject=f"key:{key.id}"))
    assert event.action == "key.change"
    assert (event.before["limits"], event.after["limits"]) == ({"streams": 1}, None)


async def test_a_key_that_has_ended_does_not_change(tenancy: Tenancy) -> None:
    await make_tenant(tenancy)
    key = await make_key(tenancy)
    async with tenancy.change(ME) as session:
        await session.keys.revoke(key.id)
    for id_, error in ((key.id, Conflict), ("none", NotFound)):
        with pytest.raises(error):
            async with tenancy.change(ME) as session:
                await session.keys.change(id_, KeyChange(label="x"))


# --- peppers ---------------------------------------------------------------------------------------------------------


async def test_keys_of_both_peppers_are_told_apart_until_they_are_rotated(
    tenancy: Tenancy, open_database: Opener, records: MemoryTenants
) -> None:
    await make_tenant(tenancy)
    old, older = await make_key(tenancy), await make_key(tenancy)
    async with tenancy.database.transaction() as connection:  # as a release without pepper ids wrote it
        await connection.execute(text(f"UPDATE api_keys SET pepper = NULL WHERE id = '{older.id}'"))
    async with open_database(records, pepper=OTHER, previous=PEPPER) as both:
        new = await make_key(both)
        async with both.read() as session:
            found = {key.id: key.pepper for key in await session.keys.page("acme")}
            assert found == {old.id: "previous", older.id: "previous", new.id: "current"}
            assert await session.keys.peppers() == {"previous": 2, "current": 1}
        gateway = KeyStore(pepper=OTHER.encode(), previous=PEPPER.encode(), published=True)
        await TenantFeed(records, gateway).read()
        assert all(gateway.find(key.key, 0.0) is not None for key in (old, older, new))
        assert gateway.find(old.key + "x", 0.0) is None
        async with both.change(ME) as session:
            rotated = await session.keys.rotate(old.id, 0)
            assert rotated.pepper == "current"
            assert await session.keys.peppers() == {"previous": 1, "current": 2}
    alone = KeyStore(pepper=OTHER.encode(), published=True)
    await TenantFeed(records, alone).read()
    assert alone.find(rotated.key, 0.0) is not None and alone.find(older.key, 0.0) is None
    async with open_database(None, pepper=OTHER) as later, later.read() as session:
        assert (await session.keys.find(old.id)).pepper == "lost"
    async with open_database(None, pepper="") as bare, bare.read() as session:
        assert (await session.keys.find(new.id)).pepper == "unknown"
