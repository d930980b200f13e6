"""Prefixes: block hashes, the agent's ledger against a cache that it cannot see, the gateway's view."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.limits import PREFIX_BLOCK_BYTES, PREFIX_BLOCKS_MAX, PREFIX_SUMMARY_BLOCKS_MAX
from stream_fabric.pool.prefix import PrefixLedger, PrefixView, block_hashes

CHAINS = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def chain(path: list[int]) -> list[int]:
    """Hashes of a prompt whose blocks are these."""
    return block_hashes(b"", [b"%d" % n + b"x" * (PREFIX_BLOCK_BYTES - 1) for n in path])


@given(data=st.binary(max_size=5000), cuts=st.lists(st.integers(0, 5000), max_size=5))
def test_hashes_do_not_depend_on_how_the_bytes_are_cut(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[a:b] for a, b in pairwise(edges)]
    assert block_hashes(b"m", parts) == block_hashes(b"m", [data])
    assert len(block_hashes(b"m", [data])) == len(data) // PREFIX_BLOCK_BYTES


def test_equal_prefixes_have_equal_hashes_and_others_do_not() -> None:
    one, two = chain([1, 2, 3, 4]), chain([1, 2, 9, 4])
    assert one[:2] == two[:2]
    assert not set(one[2:]) & set(two[2:])
    assert not set(block_hashes(b"a", [b"x" * 2048])) & set(block_hashes(b"b", [b"x" * 2048]))


def test_hashes_of_one_prompt_are_bounded() -> None:
    assert len(block_hashes(b"", [b"x" * (PREFIX_BLOCK_BYTES * (PREFIX_BLOCKS_MAX + 9))])) == PREFIX_BLOCKS_MAX


@given(prompts=st.lists(CHAINS, max_size=30), capacity=st.integers(1, 20))
def test_the_ledger_follows_an_engine_that_evicts_the_least_recently_used(
    prompts: list[list[int]], capacity: int
) -> None:
    """With the engine's own capacity it believes what the engine holds, and what it holds is always a beginning."""
    ledger, cache = PrefixLedger(), OrderedDict[int, None]()
    ledger.set_capacity(capacity)
    for path in prompts:
        hashes = chain(path)
        held = 0
        while held < len(hashes) and hashes[held] in cache:
            held += 1
        assert ledger.match(hashes) == held
        ledger.touch(hashes)
        for value in reversed(hashes):
            cache[value] = None
            cache.move_to_end(value)
        while len(cache) > capacity:
            cache.popitem(last=False)
        view = PrefixView(ledger.summary(), ledger.version)
        assert view.match(hashes) == ledger.match(hashes) == min(len(hashes), capacity)


def test_the_ledger_is_bounded_over_any_number_of_prefixes() -> None:
    ledger = PrefixLedger()
    rng = random.Random(1)
    for _ in range(20_000):
        ledger.touch([rng.getrandbits(32) for _ in range(8)])
    assert len(ledger) == PREFIX_SUMMARY_BLOCKS_MAX
    assert len(ledger.summary()) == 4 * PREFIX_SUMMARY_BLOCKS_MAX


def test_beliefs_that_prove_wrong_shrink_the_ledger_and_right_ones_let_it_grow() -> None:
    ledger = PrefixLedger()
    chains = [[k * 100 + i for i in range(100)] for k in range(50)]
    for hashes in chains:
        ledger.touch(hashes)
    for hashes in chains[:20]:
        ledger.adjust_limit(ledger.match(hashes), 0)
    shrunk = len(ledger)
    assert shrunk < 4000
    for _ in range(2000):
        ledger.adjust_limit(100, 100)
    for hashes in chains:
        ledger.touch(hashes)
    assert len(ledger) == 5000


def test_evictions_and_clears_are_followed_and_make_a_new_version() -> None:
    ledger = PrefixLedger()
    ledger.touch(chain([1, 2, 3]))
    before = ledger.version
    ledger.evict(1)
    assert ledger.version != before
    assert ledger.match(chain([1, 2, 3])) == 2, "a chain's end goes first"
    ledger.clear()
    assert (len(ledger), ledger.summary()) == (0, b"")


def test_a_view_knows_of_what_it_has_sent() -> None:
    view = PrefixView()
    view.sent(chain([1, 2]))
    assert view.match(chain([1, 2, 3])) == 2
