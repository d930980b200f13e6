"""The benchmark of placing packs its calls with the platform's own code."""

from __future__ import annotations

import hiredis

from bench.place import packed_places
from stream_fabric.redis.scripts import script
from stream_fabric.stream.ids import ReplicaId


async def test_the_packed_calls_are_those_of_the_platform() -> None:
    calls = await packed_places([ReplicaId("r1"), ReplicaId("r2")], variants=3)
    assert len(set(calls)) == 3
    for call in calls:
        parser = hiredis.Reader()
        parser.feed(call)
        name, sha, keys, *_ = parser.gets()
        assert (name, sha.decode(), keys) == (b"EVALSHA", script("place").sha, b"1")
