"""Published records in a gateway: what keys and plans allow, and which keys a change revokes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from stream_fabric.accounts.records import (
    KeyRecord,
    Limits,
    PlanRecord,
    PricesRecord,
    Record,
    TenantRecord,
    encode_record,
    record_name,
)
from stream_fabric.errors import FabricUnavailable, KeyRevoked, Unauthenticated
from stream_fabric.events import Prices
from stream_fabric.stream.ids import TenantId
from stream_gw.auth import Authenticator, KeyStore, Revoked, TenantFeed, TokenRequest
from stream_gw.auth.peppered import peppered_digest
from stream_gw.auth.tokens import TokenSigner
from tests.support.memory_tenants import MemoryTenants

PEPPER = b"sixteen bytes at least"
NOW = 1_800_000_000.0
ACME = TenantId("acme")
KEY = "sgw_abc_secret"


def key(name: str = "abc", **more: object) -> KeyRecord:
    fields: dict[str, object] = {"scopes": ("create", "read"), **more}
    return KeyRecord(name, peppered_digest(f"sgw_{name}_secret", PEPPER), **fields)  # type: ignore[arg-type]


class Gateway:
    """A store that is fed from memory. ``revision`` counts the publications."""

    def __init__(self) -> None:
        self.records = MemoryTenants()
        self.keys = KeyStore(pepper=PEPPER, published=True)
        self.skipped: list[str] = []
        self.feed = TenantFeed(self.records, self.keys, self.skipped.append)
        self.authenticator = Authenticator(self.keys, TokenSigner(PEPPER))
        self.revision = 0

    async def publish(self, *records: Record, deleted: Mapping[str, bytes] | None = None) -> list[Revoked]:
        """Publish records, and read them."""
        self.revision += 1
        named = {record_name(record): encode_record(record) for record in records} | dict(deleted or {})
        await self.records.publish({name: (self.revision, data) for name, data in named.items()})
        return await self.feed.read()

    def taken(self, credential: str = KEY, now: float = NOW) -> bool:
        try:
            self.authenticator.authenticate(credential, now)
        except Unauthenticated:
            return False
        return True


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


async def test_a_key_counts_once_its_tenant_and_its_plan_are_known(gateway: Gateway) -> None:
    assert not gateway.taken()
    await gateway.publish(TenantRecord("acme", "pro", (key(),)))
    assert not gateway.taken(), "a plan that is not known may have limits"
    await gateway.publish(PlanRecord("pro"))
    assert gateway.taken()
    assert not gateway.taken("sgw_abc_Secret")
    assert not gateway.taken(key().digest), "the digest is no key"


async def test_a_key_expires(gateway: Gateway) -> None:
    await gateway.publish(PlanRecord("pro"), TenantRecord("acme", "pro", (key(expires_at=NOW + 5),)))
    who = gateway.authenticator.authenticate(KEY, NOW)
    assert gateway.authenticator.is_valid(who, NOW + 4.9)
    assert not gateway.authenticator.is_valid(who, NOW + 5)
    assert not gateway.taken(now=NOW + 5)


async def test_a_change_tells_which_keys_it_revokes(gateway: Gateway) -> None:
    await gateway.publish(PlanRecord("pro", finish_revoked=True), TenantRecord("acme", "pro", (key(), key("def"))))
    assert await gateway.publish(TenantRecord("acme", "pro", (key("def"),))) == [
        Revoked(ACME, frozenset({"abc"}), True)
    ]
    assert not gateway.taken()
    assert gateway.taken("sgw_def_secret")
    assert await gateway.publish(TenantRecord("acme", "pro", (key("def"), key("ghi")))) == []
    suspended = TenantRecord("acme", "pro", (key("def"), key("ghi")), suspended=True)
    (revoked,) = await gateway.publish(suspended)
    assert revoked.keys == {"def", "ghi"}
    assert await gateway.publish(msgspec.structs.replace(suspended, suspended=False)) == []
    assert gateway.taken("sgw_def_secret")
    (revoked,) = await gateway.publish(deleted={"tenant:acme": b""})
    assert revoked.keys == {"def", "ghi"}
    assert not gateway.taken("sgw_def_secret")


async def test_a_capability_token_lives_as_long_as_its_key(gateway: Gateway) -> None:
    await gateway.publish(PlanRecord("pro"), TenantRecord("acme", "pro", (key(),)))
    owner = gateway.authenticator.authenticate(KEY, NOW)
    token, _ = gateway.authenticator.mint(owner, TokenRequest(scopes=["read"]), NOW)
    who = gateway.authenticator.authenticate(token, NOW)
    assert gateway.authenticator.is_valid(who, NOW)
    (revoked,) = await gateway.publish(TenantRecord("acme", "pro", (key(generation=1),)))
    assert revoked.keys == {"abc"}, "its streams may be those of its tokens"
    with pytest.raises(KeyRevoked):
        gateway.authenticator.authenticate(token, NOW)
    assert not gateway.authenticator.is_valid(who, NOW)
    assert gateway.taken(), "the key itself stays"


async def test_models_are_those_of_the_key_that_the_plan_allows(gateway: Gateway) -> None:
    plan = PlanRecord("pro", models=("m1", "m2"))
    await gateway.publish(plan, TenantRecord("acme", "pro", (key(models=("m2", "m3")), key("def"))))
    assert gateway.authenticator.authenticate(KEY, NOW).models == {"m2"}
    assert gateway.authenticator.authenticate("sgw_def_secret", NOW).models == {"m1", "m2"}
    await gateway.publish(PlanRecord("pro"))
    assert gateway.authenticator.authenticate(KEY, NOW).models == {"m2", "m3"}, "a new plan counts at once"


async def test_what_a_request_counts_against(gateway: Gateway) -> None:
    plan = PlanRecord(
        "pro",
        tenant=Limits(streams=9),
        key=Limits(streams=3),
        user=Limits(streams=1),
        model={"m": Limits(streams=2), "*": Limits(streams=5)},
    )
    await gateway.publish(plan, TenantRecord("acme", "pro", (key(), key("def", limits=Limits(streams=4)))))
    who, other = (gateway.authenticator.authenticate(f"sgw_{name}_secret", NOW) for name in ("abc", "def"))

    found = gateway.keys.subjects(who, "ann", "m")
    assert [limits.streams for _, limits in found] == [9, 3, 1, 2]
    assert found[2] != gateway.keys.subjects(who, "bob", "m")[2]
    assert "ann" not in found[2].name, "names of users are no keys of Redis"
    assert [limits.streams for _, limits in gateway.keys.subjects(other, None, "else")] == [9, 4, 5]
    await gateway.publish(PlanRecord("pro"))
    (only,) = gateway.keys.subjects(who, "ann", "m")
    assert only.name == "key:abc", "the streams of a key are known when it is revoked"


async def test_prices_of_the_tenant_come_first(gateway: Gateway) -> None:
    all_prices = PricesRecord({"m": Prices(1, 1, 1), "*": Prices(2, 2, 2)})
    await gateway.publish(all_prices, PlanRecord("pro"), TenantRecord("acme", "pro", prices={"*": Prices(3, 3, 3)}))
    assert gateway.keys.prices(ACME, "m") == Prices(3, 3, 3)
    assert gateway.keys.prices(TenantId("other"), "m") == Prices(1, 1, 1)
    assert gateway.keys.prices(TenantId("other"), "else") == Prices(2, 2, 2)


async def test_a_record_of_a_newer_release_is_skipped_and_counted(gateway: Gateway) -> None:
    await gateway.publish(PlanRecord("pro"), TenantRecord("acme", "pro", (key(),)))
    await gateway.publish(deleted={"plan:pro": b'{"name":"pro","tier":"free"}', "quota:x": b"{}"})
    assert sorted(gateway.skipped) == ["plan", "quota"]
    assert gateway.taken(), "what is known of the plan holds"


async def test_the_last_records_serve_while_none_can_be_read(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    await gateway.publish(PlanRecord("pro"), TenantRecord("acme", "pro", (key(),)))

    async def away(since: int) -> tuple[int, dict[str, bytes]]:
        raise FabricUnavailable("away")

    monkeypatch.setattr(gateway.records, "changes", away)
    with pytest.raises(FabricUnavailable):
        await gateway.feed.read()
    assert gateway.taken()
