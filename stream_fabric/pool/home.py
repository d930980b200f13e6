"""Home partitions: the few partitions that hold the streams of a pool. Pure.

A replica appends to one partition in one script, with all of its streams there. Were streams spread over all
partitions, each script of a large fleet would carry one token, and would cost five times as much a token.
"""

from __future__ import annotations

from binascii import crc32
from typing import Final

HOMES_MIN: Final = 2
REPLICAS_PER_HOME: Final = 4


def home_partition(pool: str, replicas: int, partitions: int, draw: int) -> int | None:
    """Return the partition for a new stream of a pool; None: any will do.

    ``replicas``: of the pool. ``partitions``: of the fleet; one that is no power of two has no homes. ``draw``: a
    random number, which spreads the pool's streams over its homes.
    """
    homes = max(HOMES_MIN, -(-replicas // REPLICAS_PER_HOME))
    if homes >= partitions or partitions & (partitions - 1):
        return None
    return (crc32(pool.encode()) + draw % homes) % partitions
