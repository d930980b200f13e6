"""Lua scripts: read from files once, called by their SHA, sent again where a server does not know them.

Constants that Lua shares with Python are rendered into the scripts here; no script has a number of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Coroutine, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from stream_fabric import limits
from stream_fabric.accounts import account, budgets
from stream_fabric.pool import overload, placement
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.wire import Arg

_POOL_SCRIPTS = {
    "place",
    "report",
    "queue_remove",
    "queue_positions",
    "retire",
    "flight_remove",
    "inbox_ack",
    "lease_changes",
    "tier_queues",
    "work_restore",
}
_ACCOUNT_SCRIPTS = {
    "account_add",
    "account_admit",
    "account_extend",
    "account_raise",
    "account_reprice",
    "account_settle",
}
_RESPONSE_SCRIPTS = {"response_begin", "response_complete", "response_delete", "response_due", "response_saved"}
_DELETING_SCRIPTS = {"delete", "forget"}
_SHARED = {
    "": (),
    "pool": ("pool",),
    "account": ("account", "account_budget"),
    "response": ("response",),
    "deleting": ("content",),
}
"""Further parts in front of a script."""
_KINDS = {
    "pool": _POOL_SCRIPTS,
    "account": _ACCOUNT_SCRIPTS,
    "response": _RESPONSE_SCRIPTS,
    "deleting": _DELETING_SCRIPTS,
}
_UNREFUSED = {
    "account_extend",
    "account_raise",
    "account_reprice",
    "account_settle",
    "append",
    "cancel",
    "delete",
    "fence",
    "forget",
    "report",
    "response_delete",
    "response_saved",
    "state_request",
    "takeover",
    "tenants_publish",
    "unwatch",
    "watch",
}
"""Scripts on a hash that Redis must run at its memory limit: without them running streams and leases would end.

Others that it must run free memory first themselves.
"""
RECOUNT_EVERY_MS = 1000
"""Least time between two recounts of a pool's bytes, which cost time in its size."""
_UNREFUSE = "redis.call('HDEL', KEYS[1], '')\n"
"""A write that changes nothing. At its memory limit Redis refuses a script only before its first write.

It names a declared key: while a slot moves, Redis Cluster refuses a script that reaches another absent key.
"""


def constants(shared: str) -> str:
    """Render the constants of the stream scripts as Lua locals; ``pool``, ``account``, ``response``: also those of
    these scripts."""
    values: dict[str, float | str] = {
        "EXPIRY_EVERY_MS": limits.EXPIRY_EVERY_S * 1000,
        "USAGE_TTL_MS": limits.USAGE_TTL_S * 1000,
        "UNBILLED_MS": limits.UNBILLED_KEPT_S * 1000,
        "ZERO_KEPT_MS": limits.ZERO_RETENTION_S * 1000,
        "LEASE_MS_MAX": limits.LEASE_TTL_S_MAX * 1000,
    }
    if shared == "account":
        values |= {
            "MINUTE_MS": account.MINUTE_MS,
            "CHECK_MS": account.CHECK_MS,
            "CHECKED_MAX": account.CHECKED_MAX,
            "KEPT_MS": account.KEPT_MS,
            "BUDGET_IDLE_MS": budgets.BUDGET_IDLE_MS,
            "OUTPUT_MIN": budgets.OUTPUT_MIN,
            "WARN_FIFTHS": budgets.WARN_FIFTHS,
            "REQUEST": f"'{budgets.REQUEST}'",
        }
    if shared == "response":
        values["SCANNED_MAX"] = limits.RESPONSES_SCANNED_MAX
    if shared == "pool":
        values |= {
            "TIERS": len(placement.TIERS),
            "BATCH_TIER": placement.BATCH_TIER,
            "FREE_TIER": placement.FREE_TIER,
            "DEFAULT_SHARE": placement.DEFAULT_SHARE,
            "PINNED_QUEUE_SHARE": placement.PINNED_QUEUE_SHARE,
            "SCAN_MAX": placement.SCAN_MAX,
            "KV_PENDING_WEIGHT": placement.KV_PENDING_WEIGHT,
            "RATE_WINDOW_MS": placement.RATE_WINDOW_MS,
            "LOOK_AHEAD": placement.LOOK_AHEAD,
            "PASSED_MAX": placement.PASSED_MAX,
            "LOCALITY": placement.LOCALITY,
            "RETRIES_MS": overload.RETRIES_MS,
            "RETRY_S_MAX": overload.RETRY_S_MAX,
            "RETRY_SPREAD": overload.RETRY_SPREAD,
            "DRAW_SCALE": overload.DRAW_SCALE,
            "DUTY_MS": overload.DUTY_MS,
            "YIELD_MS": overload.YIELD_MS,
            "BATCH_AHEAD_MS": overload.BATCH_AHEAD_MS,
            "RECOUNT_EVERY_MS": RECOUNT_EVERY_MS,
            "POOL_TTL_MS": limits.POOL_TTL_S * 1000,
            "GONE_KEPT_MS": limits.GONE_KEPT_S * 1000,
        }
    return "".join(f"local {name} = {value}\n" for name, value in values.items())


class Script:
    """One Lua script, with its constants and shared functions in front of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        folder = files("stream_fabric.redis") / "lua"
        shared = next((kind for kind, names in _KINDS.items() if name in names), "")
        parts = ["prelude", *_SHARED[shared], name]
        first = _UNREFUSE if name in _UNREFUSED else ""
        self.source = constants(shared) + first + "".join((folder / f"{part}.lua").read_text() for part in parts)
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    def __call__(
        self,
        client: RedisClient,
        slot: int,
        keys: Sequence[str],
        args: Sequence[Arg],
        *,
        timeout_s: float | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Run the script on the server of the slot, which all keys belong to. Raises FabricError."""
        return client.run_script(slot, self.name, self.sha, self.source, (len(keys), *keys, *args), timeout_s=timeout_s)


@cache
def script(name: str) -> Script:
    """Load the script ``lua/<name>.lua``, once per process."""
    return Script(name)
