"""Budgets of tenants: the law, the scripts on real Redis, and that both agree."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream_fabric.accounts.account import AccountState, Admitted, Settlement, Spent, Subject
from stream_fabric.accounts.budgets import BUDGET_IDLE_MS, OUTPUT_MIN, BudgetUse, Claim, Crossed, Spend
from stream_fabric.accounts.periods import counter_name, expires_ms, resets_ms
from stream_fabric.accounts.records import Limits
from stream_fabric.events import Prices
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy import accounts as adapter
from stream_fabric.redis.tenancy.accounts import RedisAccounts
from stream_fabric.stream.ids import StreamId, TenantId
from tests.fabric.test_accounts import NOW_MS, _TimedScript, stream

MONTH = counter_name("tenant_month", NOW_MS)
HOUR = counter_name("tenant_hour", NOW_MS)
PRICES = Prices(2_500_000, 1_250_000, 10_000_000)


def claim(name: str = MONTH, tokens: int | None = 1000, micro: int | None = None) -> Claim:
    return Claim(name, tokens, micro, expires_ms(name))


class Account:
    """The law with a clock that the test moves."""

    def __init__(self) -> None:
        self.state, self.now_ms = AccountState(), NOW_MS

    def admit(
        self, number: int, *claims: Claim, prompt: int = 10, output: int = 256, prices: Prices = PRICES
    ) -> Admitted | Spent:
        spend = Spend(claims or (claim(),), prompt, output, prices)
        reply = self.state.admit(stream(number), (), 0, self.now_ms, spend)
        assert isinstance(reply, Admitted | Spent)
        return reply

    def extend(self, number: int, output: int, prompt: int = 0) -> int:
        return self.state.extend(stream(number), output, prompt, self.now_ms).granted

    def settle(self, number: int, prompt: int, output: int, cached: int = 0) -> None:
        self.state.settle(Settlement(stream(number), prompt + output, 1, cached, output), self.now_ms)

    def use(self, name: str = MONTH) -> BudgetUse:
        return self.state.budgets.use(name, self.now_ms)


# --- the law -----------------------------------------------------------------------------------------------


def test_a_stream_gets_what_fits_and_no_more() -> None:
    account = Account()
    first, second = account.admit(1, output=256), account.admit(2, output=900)
    assert isinstance(first, Admitted) and first.granted == 256
    assert isinstance(second, Admitted) and second.granted == 1000 - 266 - 10
    refused = account.admit(3, output=100)
    assert isinstance(refused, Spent) and (refused.claim, refused.unit) == (0, "tokens")
    assert account.extend(1, 512) == 256
    account.settle(2, 10, 24)
    assert account.extend(1, 512) == 512
    assert account.extend(1, 5000) == 1000 - 34 - 10


def test_a_small_answer_needs_room_for_itself_only() -> None:
    account = Account()
    assert isinstance(account.admit(1, output=990 - OUTPUT_MIN), Admitted)
    assert isinstance(account.admit(2, prompt=1, output=OUTPUT_MIN), Spent)
    assert isinstance(account.admit(3, prompt=1, output=OUTPUT_MIN - 1), Admitted)


def test_money_counts_cached_tokens_at_their_own_price() -> None:
    account = Account()
    budget = claim(tokens=None, micro=10_000)
    first = account.admit(1, budget, prompt=1000, output=900)
    assert isinstance(first, Admitted)
    assert first.granted == (10_000 - 2500) // 10  # 2.5 a prompt token, 10 an output token
    account.settle(1, 1000, 100, cached=800)
    assert account.use().micro == 200 * 5 // 2 + 800 * 5 // 4 + 1000
    assert account.use() == BudgetUse(1100, 2500, 0, 0, 1)


def test_a_cheaper_model_that_answers_is_charged_at_its_price() -> None:
    account = Account()
    prices = Prices(2_000_000, 1_000_000, 8_000_000)
    account.admit(1, claim(micro=10_000), prompt=10, output=100, prices=prices)
    assert account.use().reserved_micro == 820
    account.state.reprice(stream(1), Prices(1_000_000, 1_000_000, 2_000_000), account.now_ms)
    assert account.use().reserved_micro == 210
    account.settle(1, 10, 50)
    assert account.use() == BudgetUse(60, 110)


def test_what_has_no_price_counts_nothing_in_money() -> None:
    account = Account()
    assert isinstance(account.admit(1, claim(tokens=None, micro=0), prices=Prices()), Admitted)
    assert isinstance(account.admit(2, claim(tokens=None, micro=0)), Spent)


def test_a_request_of_its_own_budget_needs_no_counter() -> None:
    account = Account()
    own = Claim("request", 100, None)
    first = account.admit(1, own, prompt=40, output=256)
    assert isinstance(first, Admitted) and first.granted == 60
    assert account.extend(1, 512) == 60
    assert account.extend(1, 512, prompt=30) == 70, "the prompt was shorter than estimated"
    assert isinstance(account.admit(2, own, prompt=90, output=256), Spent)
    account.settle(1, 40, 60)
    assert account.use("request") == BudgetUse()


def test_a_prompt_longer_than_estimated_leaves_less_for_the_output() -> None:
    account = Account()
    account.admit(1, claim(tokens=100), prompt=10, output=256)
    assert account.extend(1, 0, prompt=70) == 30
    assert account.extend(1, 0, prompt=101) == 0
    account.settle(1, 101, 0)
    assert account.use().tokens == 100, "a budget never holds more than its limit"


def test_a_use_beyond_the_reservation_counts_as_far_as_there_is_room() -> None:
    account = Account()
    account.admit(1, prompt=10, output=100)
    account.settle(1, 400, 100)
    assert account.use().tokens == 500


def test_a_stream_is_charged_to_the_period_of_its_admission() -> None:
    account = Account()
    account.admit(1, claim(HOUR), output=100)
    account.now_ms = resets_ms(HOUR) + 1
    account.settle(1, 10, 50)
    assert account.use(HOUR).tokens == 60
    account.now_ms = expires_ms(HOUR)
    assert account.use(HOUR) == BudgetUse()


def test_a_budget_warns_once_in_its_period_and_says_once_that_it_is_exceeded() -> None:
    account = Account()
    first = account.admit(1, output=700)
    assert isinstance(first, Admitted) and first.crossed == ()
    second = account.admit(2, output=100)
    assert isinstance(second, Admitted) and second.crossed == (Crossed(MONTH, "warning"),)
    assert second.budgets[0].warned
    account.settle(1, 10, 0)
    third = account.admit(3, output=880)
    assert isinstance(third, Admitted) and third.crossed == ()
    for number, crossed in ((4, (Crossed(MONTH, "exceeded"),)), (5, ())):
        refused = account.admit(number)
        assert isinstance(refused, Spent) and refused.crossed == crossed


def test_a_running_stream_crosses_marks_too() -> None:
    account = Account()
    account.admit(1, output=256)
    assert account.state.extend(stream(1), 600, 0, NOW_MS).crossed == ()
    assert account.state.extend(stream(1), 900, 0, NOW_MS).crossed == (Crossed(MONTH, "warning"),)
    assert account.state.extend(stream(1), 1200, 0, NOW_MS) == (990, (Crossed(MONTH, "exceeded"),))


def test_a_sessions_counter_lives_after_its_last_request() -> None:
    account, session = Account(), Claim("session:x", 1000, None)
    account.admit(1, session)
    account.settle(1, 10, 20)
    account.now_ms += BUDGET_IDLE_MS - 1
    account.admit(2, session)
    account.settle(2, 10, 20)
    account.now_ms += BUDGET_IDLE_MS - 1
    assert account.use("session:x").tokens == 60
    account.now_ms += 1
    assert account.use("session:x").tokens == 0


def test_a_counter_is_raised_and_never_lowered() -> None:
    account = Account()
    account.state.budgets.raise_to(MONTH, 500, 70, expires_ms(MONTH), NOW_MS)
    account.state.budgets.raise_to(MONTH, 400, 90, expires_ms(MONTH), NOW_MS)
    assert account.use() == BudgetUse(500, 90)


def test_periods_are_those_of_utc() -> None:
    at = 1_798_761_599_000  # 2026-12-31T23:59:59Z
    assert counter_name("tenant_month", at) == "tenant_month:2026-12"
    assert counter_name("user_day", at, "ab12") == "user_day:ab12:2026-12-31"
    assert counter_name("tenant_hour", at) == "tenant_hour:2026-12-31T23"
    for kind in ("tenant_month", "user_day", "tenant_hour"):
        assert resets_ms(counter_name(kind, at)) == at + 1000
    assert expires_ms("tenant_month:2026-12") == at + 1000 + 7 * 86_400_000
    assert resets_ms("session:abc") == expires_ms("session:abc") == 0


# --- any interleaving --------------------------------------------------------------------------------------


@dataclass
class Life:
    """A stream as its agent knows it: it outputs no more than it was granted."""

    prompt: int
    granted: int
    output: int = 0


@dataclass
class World:
    account: Account = field(default_factory=Account)
    lives: dict[int, Life] = field(default_factory=dict)
    charged: int = 0
    paid: int = 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "extend", "emit", "emit", "settle", "cancel"]),
        st.integers(0, 11),
        st.integers(0, 400),
        st.integers(1, 60),
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.integers(0, 2000), st.integers(0, 9000))
def test_no_interleaving_exceeds_a_budget(steps: list[tuple[str, int, int, int]], tokens: int, micro: int) -> None:
    """Tokens that left the agents, and their price, never exceed a budget."""
    world, budget = World(), claim(MONTH, tokens, micro)
    account = world.account
    for what, number, amount, prompt in steps:
        life = world.lives.get(number)
        if what == "admit" and life is None:
            reply = account.admit(number, budget, Claim("session:s", tokens, None), prompt=prompt, output=amount + 1)
            if isinstance(reply, Admitted):
                assert reply.granted >= min(amount + 1, OUTPUT_MIN)
                world.lives[number] = Life(prompt, reply.granted)
        elif life is None:
            continue
        elif what == "extend":
            granted = account.extend(number, life.output + amount)
            assert granted >= life.granted and account.extend(number, life.output + amount) == granted
            life.granted = granted
        elif what == "emit":
            life.output = min(life.granted, life.output + amount)
        else:
            output = life.output if what == "settle" else min(life.output, 3)
            account.settle(number, life.prompt, output, cached=life.prompt // 2)
            world.charged += life.prompt + output
            world.paid += PRICES.of(life.prompt, life.prompt // 2, output)
            del world.lives[number]
        use = account.use()
        assert (use.tokens, use.micro) == (world.charged, world.paid)
        assert use.tokens + use.reserved_tokens <= tokens and use.micro + use.reserved_micro <= micro
    if not world.lives:
        assert account.use()[2:4] == (0, 0)


# --- the scripts -------------------------------------------------------------------------------------------


async def test_the_scripts_agree_with_the_law(redis_client: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random lives of accounts with budgets: each reply and each counter is the same."""
    clock = f"clock-{os.urandom(4).hex()}"
    monkeypatch.setattr(adapter, "script", lambda name: _TimedScript(name, clock))
    accounts = RedisAccounts(redis_client)
    # Redis's own clock expires counters: the periods here last
    names = ("request", "session:a", "user_day:u:2099-12-31", "tenant_hour:2099-12-31T10", "tenant_month:2099-12")
    for seed in range(40):
        rng = random.Random(seed)
        tenant, law, now_ms = TenantId(f"t-{os.urandom(4).hex()}"), AccountState(), NOW_MS
        limits = {
            name: (rng.choice([None, rng.randint(0, 3000)]), rng.choice([None, rng.randint(0, 30_000)]))
            for name in names
        }
        subjects = [Subject("tenant", Limits(streams=6))] if rng.random() < 0.5 else []
        for step in range(60):
            now_ms += rng.choice([0, 1, 900, 12_345])
            await redis_client.execute(0, "SET", clock, now_ms)
            number = rng.randint(max(0, step - 8), step)
            draw = rng.random()
            if draw < 0.45:
                chosen = rng.sample(names, rng.randint(1, len(names)))
                claims = tuple(Claim(name, *limits[name], expires_ms(name)) for name in chosen)
                prices = rng.choice([Prices(), PRICES, Prices(3, 1, 999_999), Prices(2_500_000, 0, 0)])
                spend = Spend(claims, rng.randint(0, 200), rng.randint(1, 600), prices)
                expected = law.admit(stream(number), subjects, 5, now_ms, spend)
                reply = await accounts.admit(tenant, stream(number), subjects, 5, spend)
                assert reply == expected, (seed, step)
            elif draw < 0.75:
                output, prompt = rng.randint(0, 900), rng.choice([0, 0, rng.randint(1, 400)])
                wanted = law.extend(stream(number), output, prompt, now_ms)
                assert await accounts.extend(tenant, stream(number), output, prompt) == wanted, (seed, step)
            elif draw < 0.8:
                law.reprice(stream(number), Prices(1, 0, 1), now_ms)
                await accounts.reprice(tenant, stream(number), Prices(1, 0, 1))
            elif draw < 0.95:
                prompt, output = rng.randint(0, 300), rng.randint(0, 700)
                settlement = Settlement(stream(number), prompt + output, 1, rng.randint(0, prompt), output)
                settled = law.settle(settlement, now_ms)
                assert await accounts.settle(tenant, [settlement]) == settled, (seed, step)
            else:
                tokens, micro, name = rng.randint(0, 500), rng.randint(0, 5000), rng.choice(names[1:])
                law.budgets.raise_to(name, tokens, micro, expires_ms(name), now_ms)
                await accounts.raise_to(tenant, name, tokens, micro)
            found = await accounts.budgets(tenant, names)
            assert found == {name: law.budgets.use(name, now_ms) for name in names}, (seed, step)
            assert set(await accounts.reserved(tenant)) == set(law.reservations), (seed, step)


async def test_many_gateways_and_agents_share_a_budget_exactly(redis_url: str) -> None:
    """Eight clients, 40 streams that want 500 tokens each of 5,000: everything is used, and nothing more."""
    tenant = TenantId(f"t-{os.urandom(4).hex()}")
    name = "tenant_month:2099-12"
    budget = Claim(name, 5000, None, expires_ms(name))
    clients = [RedisClient(redis_url) for _ in range(8)]
    for client in clients:
        await client.start()

    async def live(number: int) -> int:
        accounts, who = RedisAccounts(clients[number % 8]), StreamId(f"resp_{number}")
        reply = await accounts.admit(tenant, who, [], 0, Spend((budget,), 7, 100))
        if not isinstance(reply, Admitted):
            return 0
        output = reply.granted
        while output < 500:
            granted = (await accounts.extend(tenant, who, output + 50)).granted
            if granted == output:
                break
            output = granted
        assert await accounts.settle(tenant, [Settlement(who, 7 + output, 1, 0, output)]) == 1
        return 7 + output

    try:
        used = sum(await asyncio.gather(*map(live, range(40))))
        found = await RedisAccounts(clients[0]).budgets(tenant, [name])
        assert used == found[name].tokens
        assert found[name].reserved_tokens == 0
        assert 4900 <= used <= 5000
    finally:
        for client in clients:
            await client.close()


async def test_the_counters_and_the_reservations_expire_and_outlive_their_streams(redis_client: RedisClient) -> None:
    tenant = TenantId(f"t-{os.urandom(4).hex()}")
    accounts = RedisAccounts(redis_client)
    month, day = "tenant_month:2099-12", "session:s"
    claims = (Claim(month, 1000, None, expires_ms(month)), Claim(day, 1000, None))
    await accounts.admit(tenant, stream(1), [], 0, Spend(claims, 10, 100))
    await accounts.raise_to(tenant, "user_day:x:2099-12-31", 5, 5)
    slot, key = adapter._slot_and_key(tenant)
    prefix = key.removesuffix("held")
    left = {}
    for name in ("held", "due", f"q:{month}", f"q:{day}", "q:user_day:x:2099-12-31"):
        left[name] = await redis_client.execute(slot, "PTTL", prefix + name)
        assert left[name] > 0, name
    assert abs(left["held"] - left[f"q:{month}"]) < 60_000, "a reservation must not be forgotten before its counter"
    assert BUDGET_IDLE_MS - 60_000 < left[f"q:{day}"] <= BUDGET_IDLE_MS
    await accounts.admit(tenant, stream(2), [], 0)
    assert await redis_client.execute(slot, "PTTL", prefix + "held") > left["held"] - 60_000


async def test_a_reservation_lives_as_long_as_the_counter_of_its_session(redis_client: RedisClient) -> None:
    """Without the reservation its tokens would stay reserved, and the session would be refused for them."""
    tenant = TenantId(f"t-{os.urandom(4).hex()}")
    await RedisAccounts(redis_client).admit(tenant, stream(1), [], 0, Spend((Claim("session:s", 1000, None),), 10, 100))
    slot, key = adapter._slot_and_key(tenant)
    for name in ("held", "due"):
        left_ms = await redis_client.execute(slot, "PTTL", key.removesuffix("held") + name)
        assert BUDGET_IDLE_MS - 60_000 < left_ms <= BUDGET_IDLE_MS, name


async def test_a_withdrawn_request_gives_everything_back(redis_client: RedisClient) -> None:
    tenant = TenantId(f"t-{os.urandom(4).hex()}")
    accounts, month = RedisAccounts(redis_client), "tenant_month:2099-12"
    await accounts.admit(tenant, stream(1), [], 0, Spend((Claim(month, 1000, None, expires_ms(month)),), 10, 100))
    await accounts.settle(tenant, [Settlement(stream(1), 0, 0)])
    assert await accounts.budgets(tenant, [month]) == {month: BudgetUse()}
