"""Our Lua scripts: read from files once, called by their SHA, loaded again where a server does not know them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.wire import Arg, ReplyError

_OF_POOLS = {"place", "report", "leave", "line", "retire", "drop", "took", "lines"}


class Script:
    def __init__(self, name: str) -> None:
        folder = files("stream_fabric.redis") / "lua"
        parts = ["prelude", *(["pool"] if name in _OF_POOLS else []), name]
        self.source = "".join((folder / f"{part}.lua").read_text() for part in parts)
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(
        self,
        client: RedisClient,
        slot: int,
        keys: Sequence[str],
        args: Sequence[Arg],
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Run where ``slot`` lives; every key must be of that slot."""
        try:
            return await client.execute(slot, "EVALSHA", self.sha, len(keys), *keys, *args, timeout_s=timeout_s)
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
            return await client.execute(slot, "EVAL", self.source, len(keys), *keys, *args, timeout_s=timeout_s)


@cache
def script(name: str) -> Script:
    return Script(name)
