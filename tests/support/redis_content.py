"""Finds text anywhere in a Redis: in names and values of all keys."""

from __future__ import annotations

from typing import Any

from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.topology import slot_of

_READS: dict[bytes, tuple[str, tuple[int | str, ...]]] = {
    b"string": ("GET", ()),
    b"hash": ("HGETALL", ()),
    b"list": ("LRANGE", (0, -1)),
    b"set": ("SMEMBERS", ()),
    b"zset": ("ZRANGE", (0, -1)),
    b"stream": ("XRANGE", ("-", "+")),
}


async def keys_with(client: RedisClient, text: bytes, name_part: bytes = b"\0") -> dict[str, int]:
    """Return the keys that hold the text or are named so, with their remaining time in ms. Not for a cluster."""
    slot, cursor, found = slot_of("p0"), b"0", {}
    while True:
        cursor, names = await client.execute(slot, "SCAN", cursor, "COUNT", 1000)
        for name in names:
            kind = await client.execute(slot, "TYPE", name)
            if kind == b"none":  # it has just expired
                continue
            verb, args = _READS[kind]
            held = name + b"\n" + b"\n".join(_leaves(await client.execute(slot, verb, name, *args)))
            if text in held or name_part in name:
                found[name.decode()] = await client.execute(slot, "PTTL", name)
        if cursor == b"0":
            return found


def _leaves(value: Any) -> list[bytes]:
    if isinstance(value, dict):
        return [leaf for pair in value.items() for part in pair for leaf in _leaves(part)]
    if isinstance(value, list | tuple | set):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value if isinstance(value, bytes) else str(value).encode()]
