"""Redis URLs and hash slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stream_fabric.redis.topology import slot_of
from stream_fabric.redis_url import Address, RedisUrl
from tests.support.redis import RedisServer


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", RedisUrl("single", (Address("h", 6379),), None, None, 0, "mymaster", False)),
        ("redis://h:1/3", RedisUrl("single", (Address("h", 1),), None, None, 3, "3", False)),
        ("rediss://u:p%40@h:1", RedisUrl("single", (Address("h", 1),), "u", "p@", 0, "mymaster", True)),
        ("redis://:secret@h", RedisUrl("single", (Address("h", 6379),), None, "secret", 0, "mymaster", False)),
        ("redis://[::1]:7", RedisUrl("single", (Address("::1", 7),), None, None, 0, "mymaster", False)),
        (
            "redis+sentinel://a,b:2/main",
            RedisUrl("sentinel", (Address("a", 26379), Address("b", 2)), None, None, 0, "main", False),
        ),
        (
            "rediss+cluster://u:p@a:1,b",
            RedisUrl("cluster", (Address("a", 1), Address("b", 6379)), "u", "p", 0, "mymaster", True),
        ),
    ],
)
def test_redis_urls(url: str, expected: RedisUrl) -> None:
    parsed = RedisUrl.parse(url)
    if expected.mode == "single":
        expected = replace(expected, master=parsed.master)
    assert parsed == expected


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h", "redis\\+sentinel://"),
        ("redis://", "host:port"),
        ("redis://h:port", "host:port"),
        ("redis+cluster://a,,b", "host:port"),
        ("redis://h/name", "database number"),
    ],
)
def test_redis_urls_refuse_junk_and_say_what_is_allowed(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RedisUrl.parse(url)


def test_slots_are_the_known_ones() -> None:
    assert slot_of("123456789") == 0x31C3
    assert slot_of("foo") == 12182


def test_slots_are_those_of_the_server() -> None:
    with RedisServer(**{"cluster-enabled": "yes"}) as server:
        for tag in ("p0", "p15", "pool:meta-llama/Llama-3", "pools", "idem:0a", "é"):
            assert server("CLUSTER", "KEYSLOT", f"sg:{{{tag}}}:x") == slot_of(tag)
