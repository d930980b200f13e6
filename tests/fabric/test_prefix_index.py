"""The index of a large pool finds what the ledgers hold."""

from __future__ import annotations

import random

from stream_fabric.pool.prefix import PrefixLedger, PrefixView
from stream_fabric.pool.prefix_index import PrefixIndex, sampled
from stream_fabric.stream.ids import ReplicaId

_NAMES = [ReplicaId(f"r{number}") for number in range(12)]


def _block(rng: random.Random) -> int:
    return rng.getrandbits(29) * 8  # one that the index knows


def _prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts that share beginnings of several lengths."""
    made: list[list[int]] = [[_block(rng) for _ in range(3)]]
    for _ in range(count):
        start = rng.choice(made)[: rng.randrange(40)] if rng.random() < 0.8 else []
        made.append([*start, *(_block(rng) for _ in range(rng.randrange(1, 25)))])
    return made


def test_replicas_are_found_in_the_order_of_what_they_hold() -> None:
    """Random lives of caches that get prompts, evict, are cleared, leave and come back."""
    rng, index = random.Random(3), PrefixIndex()
    ledgers = {name: PrefixLedger() for name in _NAMES}
    views = {name: PrefixView() for name in _NAMES}
    prompts = _prompts(rng, 60)
    compared = 0
    for _ in range(3000):
        name = rng.choice(_NAMES)
        ledger, held = ledgers[name], views[name].held
        match rng.choice(["touch"] * 6 + ["evict", "clear", "leave"]):
            case "touch":
                ledger.touch(rng.choice(prompts))
            case "evict":
                ledger.evict(rng.randrange(30))
            case "clear" if rng.random() < 0.2:
                ledger.clear()
            case "leave" if rng.random() < 0.3:
                index.drop(name, held)
                ledgers[name], views[name] = PrefixLedger(), PrefixView()
                continue
        views[name].renew(ledger.summary(), ledger.version)
        index.remove(name, held - views[name].held)
        index.add(name, views[name].held - held)
        prompt = rng.choice(prompts)
        lengths = {one: held for one in _NAMES if (held := ledgers[one].match(prompt))}
        found = index.find(prompt, len(_NAMES), rng.randrange(100))
        assert sorted(found) == sorted(lengths)
        assert [lengths[one] for one in found] == sorted(lengths.values(), reverse=True)
        compared += len(found) > 2
    assert compared > 1000
    for name in _NAMES:
        index.drop(name, views[name].held)
    assert all(not part for part in index._parts), "of replicas that left nothing is kept"


def test_a_sent_prompt_counts_until_its_agent_has_had_the_time_to_say_so() -> None:
    index = PrefixIndex()
    index.add(_NAMES[0], [800])
    index.sent(_NAMES[0], [8, 16, 24])
    for _ in range(3):
        assert index.find([8, 16, 24, 32], 9) == [_NAMES[0]]
        index.end_turn()
    assert index.find([8, 16, 24, 32], 9) == []
    index.sent(_NAMES[1], [8, 16, 24])
    assert index.find([8, 16, 24, 32], 9) == [], "a replica that is not known holds nothing"


def test_among_equals_the_turn_decides_and_the_number_is_limited() -> None:
    index = PrefixIndex()
    for name in _NAMES:
        index.add(name, [8, 16])
    assert {index.find([8, 16, 24], 1, turn)[0] for turn in range(len(_NAMES))} == set(_NAMES)
    assert len(index.find([8, 16, 24], 5)) == 5


def test_it_knows_one_block_of_eight() -> None:
    rng = random.Random(1)
    assert 1000 < len(sampled(rng.getrandbits(32) for _ in range(10_000))) < 1500
