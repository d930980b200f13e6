"""The simulator's scheduler and its KV blocks, without a clock."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from inference.engines.sim.blocks import BlockPool
from inference.engines.sim.model import Replica
from inference.engines.sim.settings import SimSettings
from inference.engines.sim.text import Prompt

FAST = {"itl_ms": 1.0, "ttft_ms": 0.0, "block_size": 4}


def replica(**more: float) -> Replica[int]:
    return Replica(SimSettings(**{**FAST, **more}))  # type: ignore[arg-type]


def chain(family: int, tokens: int, size: int = 4) -> list[int]:
    """Hashes of a prompt that shares its beginning with its family's others."""
    return [hash((family, block)) for block in range(tokens // size)]


def check_blocks(model: Replica[int]) -> None:
    """Free and used add up, and every held block is referenced exactly as often as it is held."""
    pool = model.blocks
    assert pool.free + pool.used == pool.total
    held = Counter(block for seq in [*model.running, *model.waiting] for block in seq.blocks)
    assert held == Counter(pool._references)
    for seq in model.running:
        assert len(set(seq.blocks)) == len(seq.blocks)
        # The newest token's KV is written by the step that makes the next one
        written = seq.computed - 1 if seq.made else seq.computed
        assert 0 <= written <= len(seq.blocks) * model.settings.block_size
        # Only equal prefixes are shared: a block beyond the prompt's full blocks has one owner
        for block in seq.blocks[len(seq.hashes) :]:
            assert held[block] == 1
    assert not any(seq.blocks for seq in model.waiting)


def drain(model: Replica[int], steps: int = 20_000) -> list[int]:
    """Step until idle; the keys in the order they finished."""
    done: list[int] = []
    for _ in range(steps):
        if model.idle:
            return done
        step = model.step()
        assert step.duration_s >= 0
        assert len(set(step.tokens)) == len(step.tokens), "a sequence gets at most one token a step"
        done += step.finished
        check_blocks(model)
    raise AssertionError("the replica does not finish its work")


requests = st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 40))


@given(
    st.lists(st.one_of(requests, st.integers(0, 30), st.none()), max_size=60),
    st.integers(21, 60),
    st.integers(1, 6),
    st.integers(16, 64),
)
@settings(max_examples=150)
def test_blocks_are_conserved_and_everything_ends_whatever_happens(
    script: list[tuple[int, int, int] | int | None], num_blocks: int, seqs: int, budget: int
) -> None:
    model = replica(num_blocks=num_blocks, max_num_seqs=seqs, max_num_batched_tokens=budget)
    owed: dict[int, int] = {}
    got: Counter[int] = Counter()
    for number, action in enumerate(script):
        if isinstance(action, tuple):
            family, prompt, target = action
            assert model.add(number, prompt, chain(family, prompt), target)
            owed[number] = target
        elif isinstance(action, int):
            if model.abort(action):
                del owed[action]
        else:
            got.update(model.step().tokens)
        check_blocks(model)
    while not model.idle:
        got.update(model.step().tokens)
        check_blocks(model)
    assert {key: got[key] for key in owed} == owed
    assert model.blocks.used == 0


@given(st.lists(st.integers(1, 60), min_size=2, max_size=12), st.integers(1, 4))
def test_prompts_of_one_length_end_in_the_order_they_came(prompts: list[int], seqs: int) -> None:
    model = replica(num_blocks=1000, max_num_seqs=seqs, max_num_batched_tokens=16)
    for number, prompt in enumerate(prompts):
        model.add(number, prompt, [], 1)
    first: list[int] = []
    while not model.idle:
        first += [key for key, _ in model.step().first]
    assert first == sorted(first)


def test_a_request_that_cannot_fit_is_refused() -> None:
    model = replica(num_blocks=4)
    assert model.add(1, 8, [], 8)
    assert not model.add(2, 8, [], 9)
    assert drain(model) == [1]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    model = replica(num_blocks=1000, max_num_batched_tokens=16)
    model.add(1, 4, [], 100)
    model.step()
    model.add(2, 60, [], 1)
    for _ in range(3):
        step = model.step()
        assert step.tokens == [1], "decoding goes on under the prefill"
        assert step.duration_s * 1e3 > 1
    assert 2 in model.step().tokens, "15 of the 16 tokens a step went to the prompt"


def test_when_blocks_run_out_the_youngest_computes_again() -> None:
    model = replica(num_blocks=12, max_num_seqs=4)
    for number in range(3):
        model.add(number, 8, [], 24)
    assert drain(model) == [0, 1, 2]
    assert model.preemptions > 0


def test_a_shared_prefix_is_found_and_never_the_whole_prompt() -> None:
    model = replica(num_blocks=100)
    model.add(1, 16, chain(0, 16), 1)
    drain(model)
    model.add(2, 16, chain(0, 16), 1)
    (first,) = model.step().first
    assert first == (2, 12), "the last block is computed, for something must come out"
    model.add(3, 40, chain(0, 40), 1)
    (first,) = model.step().first
    assert first == (3, 16)
    assert model.prefix_hits == 28


def test_a_prefix_in_use_is_shared() -> None:
    model = replica(num_blocks=100)
    model.add(1, 16, chain(0, 16), 10)
    model.step()
    used = model.blocks.used
    model.add(2, 17, chain(0, 17), 10)
    model.step()
    assert model.blocks.used <= used + 2


def test_the_longest_unused_prefix_is_evicted_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(4)
    for family in (1, 2):
        blocks = pool.take(2)
        assert blocks is not None
        for place, block in enumerate(blocks):
            pool.publish(block, hash((family, place)))
        pool.release(blocks)
    pool.take(1)
    assert len(pool.match([hash((1, 0)), hash((1, 1))])) == 1
    assert len(pool.match([hash((2, 0)), hash((2, 1))])) == 2
    assert pool.take(1) is None


def test_abort_frees_at_once() -> None:
    model = replica(num_blocks=100)
    model.add(1, 40, [], 10)
    model.step()
    assert model.blocks.used
    assert model.abort(1)
    assert model.blocks.used == 0
    assert not model.abort(1)


def test_step_time_is_prefill_and_decode_and_slope() -> None:
    model = replica(num_blocks=100, itl_ms=10.0, batch_slope_us=500.0, prefill_tokens_per_s=1000.0)
    for number in range(3):
        model.add(number, 4, [], 50)
    model.step()
    assert abs(model.step().duration_s - 0.011) < 1e-9


def test_the_least_ttft_holds_beside_a_stream_that_takes_no_time() -> None:
    model = replica(itl_ms=0, ttft_ms=300, prefill_tokens_per_s=1e9)
    assert model.add(1, 10, (), 5_000)
    while not model.step().first:
        pass
    assert sum(model.step().duration_s for _ in range(100)) == 0, "its own tokens take no time"
    assert model.add(2, 10, (), 1)
    took_s, tokens = 0.0, 0
    while True:
        step = model.step()
        if step.first:
            break
        took_s += step.duration_s
        tokens += len(step.tokens)
    assert 0.3 <= took_s < 0.31
    assert tokens > 100, "the first stream went on meanwhile"


@given(st.binary(max_size=400), st.integers(1, 8))
def test_a_longer_prompt_begins_with_the_shorter_ones_hashes(text: bytes, size: int) -> None:
    def hashes(content: str) -> list[int]:
        return Prompt({"messages": [{"role": "user", "content": content}]}).hashes(size)

    content = text.decode("latin-1")
    short, long = hashes(content), hashes(content + "and more of it")
    assert long[: len(short)] == short
