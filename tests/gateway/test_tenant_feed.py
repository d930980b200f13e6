"""Published records in a gateway: what keys and plans allow, and which keys a change revokes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from stream_fabric.accounts.records import (
    NO_LIMITS,
    KeyRecord,
    Limits,
    PlanRecord,
    PricesRecord,
    Record,
    TenantRecord,
    UserRecord,
    encode_record,
    record_name,
)
from stream_fabric.errors import FabricUnavailable, KeyRevoked, Unauthenticated, UserSuspended
from stream_fabric.events import Prices
from stream_fabric.stream.ids import TenantId
from stream_gw.auth import Authenticator, KeyStore, Revoked, TenantFeed, TokenRequest, UnknownKey
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


async def test_a_token_of_a_newer_key_may_be_waited_for(gateway: Gateway) -> None:
    minter = Gateway()
    await minter.publish(PlanRecord("pro"), TenantRecord("acme", "pro", (key(generation=1),)))
    owner = minter.authenticator.authenticate(KEY, NOW)
    token, _ = minter.authenticator.mint(owner, TokenRequest(scopes=["read"]), NOW)
    for generation, is_newer in ((None, True), (0, True), (1, None), (2, False)):
        keys = () if generation is None else (key(generation=generation),)
        await gateway.publish(PlanRecord("pro"), TenantRecord("acme", "pro", keys))
        if is_newer is None:
            assert gateway.taken(token)
            continue
        with pytest.raises(KeyRevoked) as refused:
            gateway.authenticator.authenticate(token, NOW)
        assert isinstance(refused.value, UnknownKey) == is_newer and refused.value.code == "api_key_revoked"


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
    assert gateway.keys.subjects(who, "ann", "m") == [("key:abc", NO_LIMITS), (found[2].name, NO_LIMITS)], (
        "the streams of a key are known when it is revoked, those of a user when it is suspended"
    )


async def test_a_suspended_user_ends_and_no_other(gateway: Gateway) -> None:
    plan, ann = PlanRecord("pro", finish_revoked=True, user=Limits(streams=1)), key("ann", user="ann")
    await gateway.publish(plan, TenantRecord("acme", "pro", (key(), ann)))
    who, free = (gateway.authenticator.authenticate(f"sgw_{name}_secret", NOW) for name in ("ann", "abc"))
    token, _ = gateway.authenticator.mint(free, TokenRequest(scopes=["read"], user="ann"), NOW)
    suspended = UserRecord("acme", "ann", suspended=True)
    assert await gateway.publish(UserRecord("acme", "bob", suspended=True)) == [Revoked(ACME, frozenset(), True, "bob")]
    assert gateway.authenticator.reason_to_end(who, NOW) is None
    assert await gateway.publish(suspended) == [Revoked(ACME, frozenset(), True, "ann")]
    assert await gateway.publish(msgspec.structs.replace(suspended, limits=Limits(streams=5))) == []
    assert isinstance(gateway.authenticator.reason_to_end(who, NOW), UserSuspended)
    assert gateway.authenticator.is_valid(free, NOW), "its key may call for other users"
    for credential in ("sgw_ann_secret", token):
        with pytest.raises(UserSuspended):
            gateway.authenticator.authenticate(credential, NOW)
    gateway.authenticator.check_user(TenantId("other"), "ann")
    assert await gateway.publish(deleted={"user:acme:ann": b""}) == []
    assert gateway.authenticator.authenticate(token, NOW).user == "ann"


async def test_limits_of_a_user_replace_those_of_the_plan(gateway: Gateway) -> None:
    await gateway.publish(PlanRecord("pro", user=Limits(streams=1)), TenantRecord("acme", "pro", (key(),)))
    await gateway.publish(
        UserRecord("acme", "a:b", limits=Limits(streams=7)), UserRecord("acme", "free", limits=Limits())
    )
    who = gateway.authenticator.authenticate(KEY, NOW)

    def streams(user: str) -> list[int | None]:
        return [limits.streams for name, limits in gateway.keys.subjects(who, user, "m") if name.startswith("user:")]

    assert (streams("a:b"), streams("other"), streams("free")) == ([7], [1], [None])


async def test_a_changed_key_changes_its_callers_and_its_tokens(gateway: Gateway) -> None:
    await gateway.publish(PlanRecord("pro"), TenantRecord("acme", "pro", (key(models=("m1", "m2")),)))
    who = gateway.authenticator.authenticate(KEY, NOW)
    token, _ = gateway.authenticator.mint(who, TokenRequest(scopes=["create", "read"]), NOW)
    minted = gateway.authenticator.authenticate(token, NOW)
    changed = key(scopes=("read", "input"), models=("m2", "m3"))
    assert await gateway.publish(TenantRecord("acme", "pro", (changed,))) == [], "nothing ends"
    assert gateway.keys.current(who).scopes == {"read", "input"}
    assert gateway.keys.current(who).models == {"m2", "m3"}
    for narrowed in (gateway.keys.current(minted), gateway.authenticator.authenticate(token, NOW)):
        assert (narrowed.scopes, narrowed.models) == ({"read"}, {"m2"}), "a token never gains rights"
    await gateway.publish(TenantRecord("acme", "pro", (key(models=("m1", "m2")),)))
    assert gateway.keys.current(minted) is minted


async def test_keys_of_the_previous_pepper_are_found_in_the_same_way() -> None:
    old = KeyRecord("old", peppered_digest("sgw_old_secret", b"the pepper before this one"), ("read",))
    records = (PlanRecord("pro"), TenantRecord("acme", "pro", (key(), old)))
    both = KeyStore(records, pepper=PEPPER, previous=b"the pepper before this one")
    assert [each.key.id for name in ("abc", "old") if (each := both.find(f"sgw_{name}_secret", NOW)) and each.key] == [
        "abc", "old"
    ]  # fmt: skip
    assert both.find("sgw_none_secret", NOW) is None
    assert KeyStore(records, pepper=PEPPER).find("sgw_old_secret", NOW) is None
    assert len(both._peppers.digests(KEY)) == 2, "both are computed for every key"


async def test_prices_of_the_tenant_come_first(gateway: Gateway) -> None:
    all_prices = PricesRecord({"m": Prices(1, 1, 1), "*": Prices(2, 2, 2)})
    await gateway.publish(all_prices, PlanRecord("pro"), TenantRecord("acme", "pro", prices={"*": Prices(3, 3, 3)}))
    assert gateway.keys.prices(ACME, "m", 1) == Prices(3, 3, 3)
    assert gateway.keys.prices(TenantId("other"), "m", 1) == Prices(1, 1, 1)
    assert gateway.keys.prices(TenantId("other"), "else", 1) == Prices(2, 2, 2)


async def test_a_record_of_a_newer_release_is_skipped_and_counted(gateway: Gateway) -> None:
    await gateway.publish(PlanRecord("pro"), TenantRecord("acme", "pro", (key(),)))
    await gateway.publish(deleted={"plan:pro": b'{"name":"pro","tier":"paid"}', "quota:x": b"{}"})
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


async def test_keys_that_a_failed_read_revoked_are_returned_by_the_next(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read applies page after page: the first one is not read again."""
    await gateway.publish(PlanRecord("pro"), TenantRecord("acme", "pro", (key(), key("def"))))
    changes, failures = gateway.records.changes, [FabricUnavailable("away")]

    async def one_page(since: int) -> tuple[int, dict[str, bytes]]:
        if since == gateway.revision and failures:
            raise failures.pop()
        return await changes(since)

    monkeypatch.setattr(gateway.records, "changes", one_page)
    with pytest.raises(FabricUnavailable):
        await gateway.publish(TenantRecord("acme", "pro", (key("def"),)))
    assert not gateway.taken()
    assert await gateway.feed.read() == [Revoked(ACME, frozenset({"abc"}), False)]
    assert await gateway.feed.read() == []


async def test_all_who_wait_for_newer_records_share_a_read(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, reads, away = gateway.records.changes, 0, False

    async def counted(since: int) -> tuple[int, dict[str, bytes]]:
        nonlocal reads
        reads += 1
        if away:
            raise FabricUnavailable("away")
        return await changes(since)

    monkeypatch.setattr(gateway.records, "changes", counted)
    feed = asyncio.create_task(gateway.feed.run(lambda revoked: None))
    try:
        new = (PlanRecord("pro"), TenantRecord("acme", "pro", (key(),)))
        named = {record_name(record): encode_record(record) for record in new}
        await gateway.records.publish({name: (1, data) for name, data in named.items()})
        with pytest.raises(UnknownKey):
            gateway.authenticator.authenticate(KEY, NOW)
        assert all(await asyncio.gather(*(gateway.feed.catch_up() for _ in range(100))))
        assert gateway.taken()
        assert reads == 2, "one that finds the records, and one that finds no more"
        away = True
        assert not await gateway.feed.catch_up()
        away = False
        assert await gateway.feed.catch_up()
    finally:
        feed.cancel()


async def test_nobody_waits_for_a_credential_that_is_no_key_of_the_database(gateway: Gateway) -> None:
    for credential in ("sk-anything", "sgt_token", ""):
        with pytest.raises(Unauthenticated) as refused:
            gateway.authenticator.authenticate(credential, NOW)
        assert not isinstance(refused.value, UnknownKey)
