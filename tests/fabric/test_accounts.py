"""Limits of tenants: the law, the scripts on real Redis, and that both agree."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence

import pytest

from stream_fabric.accounts.account import (
    CHECK_MS,
    CHECKED_MAX,
    KEPT_MS,
    MINUTE_MS,
    AccountState,
    Admitted,
    Exceeded,
    Settlement,
    Subject,
)
from stream_fabric.accounts.records import Limits
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.scripts import Script
from stream_fabric.redis.tenancy import accounts as adapter
from stream_fabric.redis.tenancy.accounts import RedisAccounts
from stream_fabric.stream.ids import StreamId, TenantId
from tests.support.waiting import eventually

NOW_MS = 1_700_000_000_000
TENANT = Subject("tenant", Limits(requests_per_min=10, tokens_per_min=1000, streams=3))


def stream(number: int) -> StreamId:
    return StreamId(f"resp_{number}")


class Account:
    """The law with a clock that the test moves."""

    def __init__(self) -> None:
        self.state, self.now_ms = AccountState(), NOW_MS

    def admit(self, number: int, *subjects: Subject, tokens: int = 1) -> Admitted | Exceeded:
        return self.state.admit(stream(number), subjects or (TENANT,), tokens, self.now_ms)

    def settle(self, number: int, tokens: int, requests: int = 1) -> bool:
        return self.state.settle(Settlement(stream(number), tokens, requests), self.now_ms)


# --- the law -----------------------------------------------------------------------------------------------


def test_a_clock_that_is_set_back_spends_nothing() -> None:
    """Redis may fail over to a host whose clock is minutes behind."""
    account = Account()
    assert isinstance(account.admit(1), Admitted)
    account.now_ms -= 5 * MINUTE_MS
    assert account.state.uses([TENANT], account.now_ms)[0] == (1, 1, 1)
    assert isinstance(account.admit(2), Admitted)
    account.now_ms += MINUTE_MS
    assert account.state.uses([TENANT], account.now_ms)[0] == (0, 0, 2)


def test_a_limit_that_was_used_up_when_the_clock_went_back_refills_within_a_minute() -> None:
    account = Account()
    account.admit(1, tokens=1000)
    account.settle(1, 1000)
    account.now_ms -= 60 * MINUTE_MS
    refused = account.admit(2, tokens=500)
    assert isinstance(refused, Exceeded) and refused.retry_ms == MINUTE_MS / 2
    account.now_ms += MINUTE_MS // 2
    assert isinstance(account.admit(2, tokens=500), Admitted)


def test_a_refused_request_takes_nothing() -> None:
    """No subject pays for a request that another subject's limit refuses."""
    account = Account()
    wide, narrow = Subject("tenant", Limits(tokens_per_min=1000)), Subject("key", Limits(tokens_per_min=100))
    assert isinstance(account.admit(1, wide, narrow, tokens=90), Admitted)
    refused = account.admit(2, wide, narrow, tokens=20)
    assert isinstance(refused, Exceeded)
    assert (refused.subject, refused.kind) == (1, "tokens")
    assert [use.tokens for use in refused.uses] == [90, 90]


def test_retry_is_when_the_bucket_has_room() -> None:
    account = Account()
    assert isinstance(account.admit(1, tokens=1000), Admitted)
    refused = account.admit(2, tokens=250)
    assert isinstance(refused, Exceeded) and refused.retry_ms == MINUTE_MS / 4
    account.now_ms += int(refused.retry_ms) - 1
    assert isinstance(account.admit(2, tokens=250), Exceeded)
    account.now_ms += 1
    assert isinstance(account.admit(2, tokens=250), Admitted)


def test_the_longest_wait_is_told() -> None:
    account = Account()
    for number in range(3):
        account.admit(number, tokens=300)
    refused = account.admit(3, tokens=300)
    assert isinstance(refused, Exceeded) and (refused.kind, refused.retry_ms) == ("tokens", 12_000)
    too_large = account.admit(4, tokens=1001)
    assert isinstance(too_large, Exceeded) and (too_large.kind, too_large.retry_ms) == ("tokens", -1)


def test_an_input_counts_as_a_request_and_is_settled_with_its_stream() -> None:
    account = Account()
    account.admit(1, tokens=300)

    def add(requests: int, tokens: int) -> Admitted | Exceeded:
        return account.state.add(stream(1), [TENANT], requests, tokens, account.now_ms)

    added = add(1, 500)
    assert isinstance(added, Admitted) and added.uses[0][:2] == (2, 800)
    refused = add(1, 250)
    assert isinstance(refused, Exceeded) and (refused.kind, refused.retry_ms) == ("tokens", 3000)
    assert isinstance(add(-1, -500), Admitted), "one that was sent twice is given back"
    assert add(1, 100).uses[0][:2] == (2, 400)
    account.settle(1, 150)
    assert account.state.uses([TENANT], account.now_ms)[0] == (2, 150, 0)
    unreserved = account.state.add(stream(9), [TENANT], 1, 5000, account.now_ms)
    assert isinstance(unreserved, Admitted), "a stream without limits pays nothing"


def test_a_settled_stream_counts_what_it_used_and_frees_its_place() -> None:
    account = Account()
    for number in range(3):
        account.admit(number, tokens=300)
    refused = account.admit(3, tokens=50)
    assert isinstance(refused, Exceeded) and (refused.kind, refused.retry_ms) == ("streams", 0)
    assert account.settle(0, tokens=20)
    admitted = account.admit(3, tokens=50)
    assert isinstance(admitted, Admitted)
    assert admitted.uses[0] == (4, 20 + 300 + 300 + 50, 3)


def test_a_stream_is_settled_once_and_a_withdrawn_one_was_never_sent() -> None:
    account = Account()
    account.admit(1, tokens=400)
    assert account.settle(1, tokens=0, requests=0)
    assert not account.settle(1, tokens=400)
    assert account.state.uses((TENANT,), account.now_ms)[0] == (0, 0, 0)


def test_use_beyond_the_estimate_is_owed() -> None:
    account = Account()
    account.admit(1, tokens=10)
    account.settle(1, tokens=2000)
    refused = account.admit(2, tokens=500)
    assert isinstance(refused, Exceeded) and refused.retry_ms == 90_000


def test_a_refund_never_gives_more_than_a_full_bucket() -> None:
    """A refund does not give back what the bucket has forgotten already."""
    account = Account()
    for number in range(3):
        account.admit(number, Subject("tenant", Limits(tokens_per_min=1000)), tokens=1000)
        account.now_ms += MINUTE_MS
    for number in range(3):
        account.settle(number, tokens=1)
    admitted = account.admit(9, Subject("tenant", Limits(tokens_per_min=1000)), tokens=1000)
    assert isinstance(admitted, Admitted) and admitted.uses[0].tokens == 1000


def test_a_repeated_admission_reserves_once() -> None:
    account = Account()
    first, again = account.admit(1, tokens=400), account.admit(1, tokens=400)
    assert isinstance(first, Admitted) and isinstance(again, Admitted)
    assert first.uses == again.uses


def test_a_reservation_that_nobody_settled_is_shown_again_and_again() -> None:
    account = Account()
    subject = Subject("tenant", Limits(streams=100))
    for number in range(CHECKED_MAX + 1):
        account.admit(number, subject)
    account.now_ms += CHECK_MS
    assert len(account.admit(100, subject).overdue) == CHECKED_MAX
    assert len(account.admit(101, subject).overdue) == 1
    assert account.admit(102, subject).overdue == ()
    account.now_ms += CHECK_MS
    assert len(account.admit(103, subject).overdue) == CHECKED_MAX


def test_zero_allows_nothing() -> None:
    account = Account()
    for limits in (Limits(requests_per_min=0), Limits(tokens_per_min=0), Limits(streams=0)):
        refused = account.admit(1, Subject("tenant", limits))
        assert isinstance(refused, Exceeded) and refused.retry_ms == -1


# --- the scripts -------------------------------------------------------------------------------------------

_TIME = "local t = redis.call('TIME')\n  return t[1] * 1000 + math.floor(t[2] / 1000)"


class _TimedScript(Script):
    """A script whose time is the value of a key."""

    def __init__(self, name: str, clock_key: str) -> None:
        super().__init__(name)
        assert self.source.count(_TIME) == 1
        self.source = self.source.replace(_TIME, f"return tonumber(redis.call('GET', '{clock_key}'))")
        self.sha = "0" * 40


async def test_the_scripts_agree_with_the_law(redis_client: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random lives of accounts: each reply is the same, to the last bit of each figure."""
    clock = f"clock-{os.urandom(4).hex()}"
    monkeypatch.setattr(adapter, "script", lambda name: _TimedScript(name, clock))
    accounts = RedisAccounts(redis_client)
    for seed in range(40):
        rng = random.Random(seed)
        tenant, law = TenantId(f"t-{os.urandom(4).hex()}"), AccountState()
        names = ("tenant", "k:1", "k:2", "u:1", "m:*")
        now_ms = NOW_MS

        def draw(rng: random.Random, names: Sequence[str] = names) -> list[Subject]:
            def figure(most: int) -> int | None:
                return rng.choice([None, rng.randint(0, most), rng.randint(1, most)])

            chosen = rng.sample(names, rng.randint(1, 4))
            return [Subject(name, Limits(figure(20), figure(2000), figure(6))) for name in chosen]

        subjects = draw(rng)
        for step in range(60):
            now_ms += rng.choice([0, 1, 17, 900, 12_345, CHECK_MS, -7 * CHECK_MS])
            await redis_client.execute(0, "SET", clock, now_ms)
            if rng.random() < 0.1:
                subjects = draw(rng)
            number = rng.randint(max(0, step - 8), step)
            if rng.random() < 0.6:
                tokens = rng.randint(0, 900)
                expected = law.admit(stream(number), subjects, tokens, now_ms)
                reply = await accounts.admit(tenant, stream(number), subjects, tokens)
                assert reply._replace(overdue=()) == expected._replace(overdue=()), (seed, step)
                assert set(reply.overdue) == set(expected.overdue), (seed, step)
                if rng.random() < 0.4:
                    more = rng.choice([(1, rng.randint(0, 900)), (-1, -rng.randint(0, 900))])
                    added = law.add(stream(number), subjects, *more, now_ms)
                    reply = await accounts.add(tenant, stream(number), subjects, *more, f"{seed} {step}")
                    assert reply == added, (seed, step)
            else:
                settlement = Settlement(stream(number), rng.randint(0, 1500), rng.randint(0, 1))
                settled = law.settle(settlement, now_ms)
                assert await accounts.settle(tenant, [settlement]) == settled, (seed, step)
            assert await accounts.uses(tenant, subjects) == law.uses(subjects, now_ms), (seed, step)
            assert set(await accounts.reserved(tenant)) == set(law.reservations), (seed, step)


async def test_a_call_whose_reply_was_lost_adds_once(redis_client: RedisClient) -> None:
    """Every script is sent again when its outcome is unknown; others may have come in between."""
    accounts, tenant = RedisAccounts(redis_client), TenantId(f"t-{os.urandom(4).hex()}")
    subjects = [Subject("tenant", Limits(requests_per_min=4, tokens_per_min=1000))]
    await accounts.admit(tenant, stream(1), subjects, 100)
    for call in ("a", "b", "a", "b", "a"):
        assert isinstance(await accounts.add(tenant, stream(1), subjects, 1, 300, call), Admitted)
    (use,) = await accounts.uses(tenant, subjects)
    assert (round(use.requests), round(use.tokens, -1)) == (3, 700)
    for call in ("c", "a", "c"):
        await accounts.add(tenant, stream(1), subjects, -1, -300, call)
    (use,) = await accounts.uses(tenant, subjects)
    assert (round(use.requests), round(use.tokens, -1)) == (2, 400)


async def test_no_interleaving_admits_more_than_the_limit(redis_url: str) -> None:
    """Eight gateways, 200 callers, 1,000 tokens per minute: the first burst admits exactly what fits."""
    tenant = TenantId(f"t-{os.urandom(4).hex()}")
    subject = Subject("tenant", Limits(tokens_per_min=1000))
    clients = [RedisClient(redis_url) for _ in range(8)]
    for client in clients:
        await client.start()
    try:
        replies = await asyncio.gather(
            *(RedisAccounts(clients[i % 8]).admit(tenant, stream(i), [subject], 50) for i in range(200))
        )
        refills = 2  # tokens that a loaded machine may take the time to refill
        assert 20 <= sum(isinstance(reply, Admitted) for reply in replies) <= 20 + refills
    finally:
        for client in clients:
            await client.close()


async def test_a_place_is_taken_for_as_long_as_its_stream_runs(redis_client: RedisClient) -> None:
    """One user's stream runs for hours, and only other users of the tenant ask: the look at it keeps its place."""
    tenant, accounts = TenantId(f"t-{os.urandom(4).hex()}"), RedisAccounts(redis_client)
    ann, bob = (Subject(f"user:{name}", Limits(streams=1)) for name in ("ann", "bob"))
    await accounts.admit(tenant, stream(1), [ann], 10)
    slot, key = adapter._slot_and_key(tenant)
    prefix = key.removesuffix("held")
    await redis_client.execute(slot, "PEXPIRE", prefix + "c:user:ann", 60_000)
    await redis_client.execute(slot, "ZADD", prefix + "due", 0, stream(1))
    assert (await accounts.admit(tenant, stream(2), [bob], 10)).overdue == (stream(1),)
    assert await redis_client.execute(slot, "PTTL", prefix + "c:user:ann") > KEPT_MS - 60_000


async def test_a_stream_that_outlives_its_bucket_owes_what_it_used(redis_client: RedisClient) -> None:
    """Its small reservation is refilled at once, and an empty bucket expires, long before the long answer ends."""
    tenant, accounts = TenantId(f"t-{os.urandom(4).hex()}"), RedisAccounts(redis_client)
    subjects = [Subject("tenant", Limits(tokens_per_min=1000)), Subject("key:k", Limits(requests_per_min=5))]
    await accounts.admit(tenant, stream(1), subjects, 10)
    slot, key = adapter._slot_and_key(tenant)
    for subject, _ in subjects:
        await redis_client.execute(slot, "DEL", key.removesuffix("held") + "b:" + subject)
    assert await accounts.reserved(tenant) == {stream(1): ("tenant", "key:k")}
    await accounts.settle(tenant, [Settlement(stream(1), 5000)])
    owing, key_use = await accounts.uses(tenant, subjects)
    assert (round(owing.tokens, -2), key_use.requests) == (5000, 0)
    assert isinstance(await accounts.admit(tenant, stream(2), subjects, 10), Exceeded)


async def test_what_is_owed_for_hours_is_not_forgotten(redis_client: RedisClient) -> None:
    """A stream used ten hours of its tenant's tokens; the refusal tells the client when they are there again."""
    tenant, accounts = TenantId(f"t-{os.urandom(4).hex()}"), RedisAccounts(redis_client)
    slow = Subject("tenant", Limits(tokens_per_min=100))
    await accounts.admit(tenant, stream(1), [slow], 10)
    await accounts.settle(tenant, [Settlement(stream(1), 60_000)])
    refused = await accounts.admit(tenant, stream(2), [slow], 10)
    assert isinstance(refused, Exceeded) and refused.retry_ms > 9 * 60 * MINUTE_MS
    slot, key = adapter._slot_and_key(tenant)
    assert await redis_client.execute(slot, "PTTL", key.removesuffix("held") + "b:tenant") > refused.retry_ms


async def test_a_used_up_limit_refills_after_the_clock_of_redis_went_back(redis_client: RedisClient) -> None:
    tenant, accounts = TenantId(f"t-{os.urandom(4).hex()}"), RedisAccounts(redis_client)
    quick = Subject("tenant", Limits(requests_per_min=100, tokens_per_min=600_000))
    await accounts.admit(tenant, stream(1), [quick], 600_000)
    await accounts.settle(tenant, [Settlement(stream(1), 600_000)])
    slot, key = adapter._slot_and_key(tenant)
    for moment in ("ra", "ta"):
        bucket = key.removesuffix("held") + "b:tenant"
        assert await redis_client.execute(slot, "HINCRBY", bucket, moment, 60 * MINUTE_MS) > 60 * MINUTE_MS
    refused = await accounts.admit(tenant, stream(2), [quick], 1000)
    assert isinstance(refused, Exceeded) and refused.retry_ms <= 100
    await eventually(lambda: _admits(accounts, tenant, quick))


async def _admits(accounts: RedisAccounts, tenant: TenantId, subject: Subject) -> bool:
    return isinstance(await accounts.admit(tenant, stream(2), [subject], 1000), Admitted)


async def test_what_an_idle_account_kept_expires(redis_client: RedisClient) -> None:
    tenant = TenantId(f"t-{os.urandom(4).hex()}")
    accounts = RedisAccounts(redis_client)
    await accounts.admit(tenant, stream(1), [TENANT], 10)
    await accounts.settle(tenant, [Settlement(stream(1), 5)])
    await accounts.admit(tenant, stream(2), [TENANT], 10)
    slot, key = adapter._slot_and_key(tenant)
    prefix = key.removesuffix("held")
    for name in ("held", "due", "b:tenant", "c:tenant"):
        assert await redis_client.execute(slot, "PTTL", prefix + name) > 0, name
