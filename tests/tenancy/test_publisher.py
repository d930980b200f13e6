"""Publication: after outages of either side, after Redis lost everything, and after a restore of the database."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
from sqlalchemy import text

from stream_fabric.accounts.records import TenantRecord, decode_record
from stream_fabric.errors import FabricLost, FabricUnavailable
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy.tenants import RedisTenants
from stream_gw.tenancy import DatabaseUnavailable, open_tenancy, publisher
from stream_gw.tenancy.models import KeyCreate, TenantChange, TenantCreate
from stream_gw.tenancy.sql.published import records_after
from stream_gw.tenancy.tenancy import Tenancy
from tests.support.memory_tenants import MemoryTenants
from tests.support.postgres import PostgresServer
from tests.support.redis import RedisServer
from tests.support.waiting import eventually
from tests.tenancy.conftest import PEPPER, Opener
from tests.tenancy.test_changes import ME, make_key, make_tenant


class Away(MemoryTenants):
    """Records that can be out of reach."""

    is_away = False

    async def revision(self) -> int:
        if self.is_away:
            raise FabricUnavailable("Redis is away")
        return await super().revision()


@contextlib.asynccontextmanager
async def publishing(tenancy: Tenancy) -> AsyncIterator[None]:
    task = asyncio.create_task(tenancy.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "TENANTS_PUBLISH_EVERY_S", 0.05)


async def test_a_change_is_kept_while_redis_is_away_and_published_later(
    open_database: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    records = Away()
    caplog.set_level(logging.INFO)
    async with open_database(records) as tenancy:
        await tenancy.database.migrate()
        records.is_away = True
        async with publishing(tenancy):
            await make_tenant(tenancy)
            assert isinstance(tenancy.unpublished, FabricUnavailable)
            await eventually(lambda: "tenants not published" in caplog.text)
            await asyncio.sleep(0.3)
            assert caplog.text.count("tenants not published") == 1, "an outage is logged once"
            records.is_away = False
            await eventually(lambda: "tenant:acme" in records.records)
            await eventually(lambda: "publishing of tenants works again" in caplog.text)
        await make_key(tenancy)
        assert tenancy.unpublished is None


async def test_a_change_that_its_maker_did_not_publish_is_published_by_the_next(
    tenancy: Tenancy, open_database: Opener, records: MemoryTenants
) -> None:
    """A process that dies between its commit and its publish leaves no hole."""
    async with open_database(None) as dying:
        await make_tenant(dying, "first")
    assert "tenant:first" not in records.records
    await make_tenant(tenancy, "second")
    assert {"tenant:first", "tenant:second"} <= records.records.keys()


class Forgetful(MemoryTenants):
    """Records that are lost after their revision was read, for the given number of times."""

    losses = 0

    async def revision(self) -> int:
        found = await super().revision()
        if self.losses and found:
            self.losses -= 1
            self.records.clear()
        return found


async def test_a_loss_between_two_calls_leaves_no_hole(open_database: Opener) -> None:
    records = Forgetful()
    async with open_database(records) as tenancy:
        await tenancy.database.migrate()
        await make_tenant(tenancy, "first")
        records.losses = 1
        await make_tenant(tenancy, "second")
        assert isinstance(tenancy.unpublished, FabricLost) and not records.records
        await make_tenant(tenancy, "third")
        assert records.records.keys() == {"plan:default", "tenant:first", "tenant:second", "tenant:third"}


@pytest.mark.parametrize("seed", range(8))
async def test_readers_converge_whatever_is_lost_meanwhile(tmp_path: Path, seed: int) -> None:
    """Several processes change tenants, some die before they publish, Redis loses everything, a reader reads on."""
    random, records, url = Random(seed), Forgetful(), f"sqlite:///{tmp_path / 't.db'}"
    read: dict[str, bytes] = {}
    since = 0
    async with (
        open_tenancy(url, records, HostClock(), HostRandom(), PEPPER) as one,
        open_tenancy(url, records, HostClock(), HostRandom(), PEPPER) as two,
        open_tenancy(url, None, HostClock(), HostRandom(), PEPPER) as dying,
    ):
        for number in range(60):
            tenant = f"t{random.randrange(6)}"
            records.losses = random.random() < 0.15
            async with random.choice([one, two, dying]).change(ME) as session:
                found = {each.id for each in await session.tenants.page()}
                if tenant not in found:
                    await session.tenants.create(TenantCreate(tenant))
                elif random.random() < 0.3:
                    await session.tenants.delete(tenant)
                else:
                    await session.tenants.change(
                        tenant, TenantChange(label=str(number), suspended=random.random() < 0.5)
                    )
            if random.random() < 0.3:
                since, changed = await records.changes(since)
                read |= changed
        records.losses = 0
        async with one.change(ME) as session:
            await session.tenants.create(TenantCreate("last"))
        _, changed = await records.changes(since)
        read |= changed
        async with one.database.transaction() as connection:
            _, whole = await records_after(connection, 0, 1000)
        assert records.records == whole
        assert read == {name: record for name, (_, record) in whole.items()}


async def test_many_changes_are_published_in_several_calls(
    tenancy: Tenancy, records: MemoryTenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "TENANT_RECORDS_PUBLISHED_MAX", 3)
    async with tenancy.change(ME) as session:
        for number in range(20):
            await session.tenants.create(TenantCreate(f"t{number}"))
    assert len(records.records) == 21


async def test_a_row_that_is_no_record_stops_no_other(
    tenancy: Tenancy, records: MemoryTenants, caplog: pytest.LogCaptureFixture
) -> None:
    await make_tenant(tenancy, "bad")
    async with tenancy.database.transaction() as connection:
        await connection.execute(text("""UPDATE tenants SET prices = '{"m": {"prompt": -1}}', revision = 3"""))
        await connection.execute(text("UPDATE revisions SET revision = 3 WHERE name = 'last'"))
    await make_tenant(tenancy, "good")
    assert decode_record("tenant:good", records.records["tenant:good"][1]) == TenantRecord("good", "default")
    assert "row not published" in caplog.text and "tenant:bad" in caplog.text
    assert records.records["tenant:bad"][0] == 2, "its last readable record stays"


async def test_a_redis_that_lost_everything_gets_everything_again(
    redis_server: RedisServer, open_database: Opener
) -> None:
    client = RedisClient(redis_server.url)
    await client.start()
    records = RedisTenants(client)
    async with open_database(records) as tenancy:
        await tenancy.database.migrate()
        await make_tenant(tenancy)
        await make_key(tenancy)
        async with tenancy.change(ME) as session:
            await session.tenants.create(TenantCreate("gone"))
            await session.tenants.delete("gone")
        before = await records.changes(0)
        assert len(before[1]) == 3
        async with publishing(tenancy):
            redis_server("FLUSHALL")

            async def is_whole() -> bool:
                return await records.changes(0) == before

            await eventually(is_whole)
            redis_server.restart()
            await eventually(is_whole)
    await client.close()


async def test_after_a_restore_of_the_database_republish_replaces_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records, file, backup = MemoryTenants(), tmp_path / "t.db", tmp_path / "backup.db"
    url = f"sqlite:///{file}"
    async with open_tenancy(url, records, HostClock(), HostRandom(), PEPPER) as tenancy:
        await make_tenant(tenancy, "old")
    backup.write_bytes(file.read_bytes())
    async with open_tenancy(url, records, HostClock(), HostRandom(), PEPPER) as tenancy:
        await make_tenant(tenancy, "new")
        async with tenancy.change(ME) as session:
            await session.tenants.change("old", TenantChange(suspended=True))
    file.write_bytes(backup.read_bytes())
    async with open_tenancy(url, records, HostClock(), HostRandom(), PEPPER) as tenancy:
        async with publishing(tenancy):
            await eventually(lambda: "stream-gw tenants republish" in caplog.text)
        assert decode_record("tenant:old", records.records["tenant:old"][1]).suspended  # type: ignore[union-attr]
        newest = await records.revision()
        assert await tenancy.republish(ME) == 1
        _, changed = await records.changes(newest)
        assert changed["tenant:new"] == b""
        assert decode_record("tenant:old", changed["tenant:old"]) == TenantRecord("old", "default")
        assert changed.keys() == {"tenant:new", "tenant:old", "plan:default", "prices"}
        await make_tenant(tenancy, "new")
        assert records.records["tenant:new"][1], "a later change is newer than the deletion"


@pytest.mark.platform
async def test_a_database_that_stops_affects_nothing_that_is_published(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    records = MemoryTenants()
    with PostgresServer() as server:
        async with open_tenancy(server.url, records, HostClock(), HostRandom(), PEPPER) as tenancy:
            await tenancy.database.migrate()
            await make_tenant(tenancy)
            before = await records.changes(0)
            async with publishing(tenancy):
                server.stop()
                await eventually(lambda: "tenants not published" in caplog.text)
                with pytest.raises(DatabaseUnavailable, match="postgres does not answer") as raised:
                    await make_tenant(tenancy, "other")
                assert "hunter2" not in raised.value.message
                assert await records.changes(0) == before
                server.start()
                await eventually(lambda: "publishing of tenants works again" in caplog.text)
                async with tenancy.change(ME) as session:
                    await session.tenants.create(TenantCreate("third"))
                    await session.keys.create(KeyCreate("third"))
                await eventually(lambda: "tenant:third" in records.records)
    assert "hunter2" not in caplog.text
