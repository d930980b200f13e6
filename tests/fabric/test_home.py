"""Home partitions of a pool's streams."""

from __future__ import annotations

import pytest

from stream_fabric.pool.home import home_partition


def homes(pool: str, replicas: int, partitions: int) -> list[int | None]:
    return [home_partition(pool, replicas, partitions, draw) for draw in range(1000)]


@pytest.mark.parametrize(("replicas", "count"), [(0, 2), (1, 2), (8, 2), (9, 3), (100, 25), (256, None), (5000, None)])
def test_a_pool_has_few_homes_whose_number_follows_its_size(replicas: int, count: int | None) -> None:
    found = set(homes("m", replicas, 64))
    assert found == {None} if count is None else len(found) == count


def test_a_pool_that_grows_keeps_its_homes() -> None:
    before: set[int | None] = set()
    for replicas in range(0, 200, 7):
        now = set(homes("m", replicas, 64))
        assert before <= now
        before = now


def test_the_homes_of_many_pools_are_spread() -> None:
    counts = [0] * 64
    for number in range(1000):
        for home in set(homes(f"model-{number}", 1, 64)):
            assert home is not None
            counts[home] += 1
    assert min(counts) > 10 and max(counts) < 60, "about 31 each"


@pytest.mark.parametrize("partitions", [1, 2, 3, 12, 100])
def test_any_partition_will_do_where_there_is_no_choice(partitions: int) -> None:
    assert set(homes("m", 1, partitions)) == {None}
