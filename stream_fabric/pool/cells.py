"""Cells: the parts of a large pool. Pure.

Each cell is a pool of its own to Redis, to agents and to recovery: it has replicas, a queue and a hash slot, so that a
large pool is not bounded by one Redis core. Gateways choose the cell of a request. Controllers and operators see the
pool as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from stream_fabric.stream.ids import ReplicaId

CELLS_MAX = 1000
_CELL = re.compile(r"(.+)~\d{1,3}", re.DOTALL)
_LOAD_RATIO_MAX = 1.25
"""Load of a cell, as a multiple of the mean, up to which requests go where their prefix is cached."""
_FULL = 0.9
"""Share of the slots in use above which a cell takes requests only if it is among the least loaded ones."""
_SPARSE = 0.3
"""Share up to which load does not matter: a batch that is less than a third full decodes at nearly full speed."""


def cell_of(pool: str, replica: ReplicaId, cells: int) -> str:
    """Return the cell of a replica in a pool of ``cells`` cells; the pool's own name if there is one."""
    if cells == 1:
        return pool
    return f"{pool}~{int.from_bytes(blake2b(replica.encode(), digest_size=8).digest(), 'big') % cells}"


def pool_of(cell: str) -> str:
    """Return the pool that a cell belongs to; of an undivided pool its own name."""
    found = _CELL.fullmatch(cell)
    return found[1] if found is not None else cell


class CellLoad(NamedTuple):
    """A cell as a gateway knows it when a request comes."""

    name: str
    streams: int
    """Streams in flight and queued."""
    slots: int
    """Sequences that its ready replicas run at once."""
    prefix: int
    """Measure of how much of the prompt a replica of the cell has cached."""

    @property
    def load(self) -> float:
        return self.streams / self.slots if self.slots else float("inf")


def choose_cell(cells: Sequence[CellLoad], key: bytes) -> str:
    """Return the cell for a request: the one that has most of the prompt cached, of those that are not overloaded.

    ``key`` decides among equals, the same way on every gateway. It names the session or the prompt's beginning.
    """
    least = min(cell.load for cell in cells)
    slots = sum(cell.slots for cell in cells)
    mean = sum(cell.streams for cell in cells) / slots if slots else 0.0
    bound = max(least, min(_LOAD_RATIO_MAX * mean, _FULL), _SPARSE)
    free = [cell for cell in cells if cell.load <= bound] or cells  # all are without a ready replica
    return max(free, key=lambda cell: (cell.prefix, _rank(cell.name, key), cell.name)).name


def _rank(cell: str, key: bytes) -> bytes:
    """Rendezvous hash: a cell that comes or goes moves only its own share of the keys."""
    return blake2b(cell.encode(), digest_size=8, key=key[:64]).digest()


def pools_of(cells: Iterable[str]) -> list[str]:
    """Return the pools that the cells belong to, sorted."""
    return sorted({pool_of(cell) for cell in cells})
