"""Sums by hour, made equal to the bills that they count.

An event that arrives twice is one row of ``bills``, and counts twice in the sums.
"""

from __future__ import annotations

from string import Template

from telemetry.store.store import Store

_USAGE = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "price_micro")
_COST = ("gpu_us", "gpu_cost_micro")
# Not deduplicated: two corrections may be the same block, and neither is a repetition of the other
_CORRECTION = Template("""
    INSERT INTO $table ($keys, $figures) SETTINGS insert_deduplicate = 0
    SELECT $keys, $sums FROM (
        SELECT $keys, $figures FROM bills FINAL WHERE $window
        UNION ALL SELECT $keys, $counted FROM $table WHERE $window
    ) AS d GROUP BY $keys HAVING $differs
""")


async def correct_hour_sums(store: Store, from_us: int, until_us: int) -> None:
    """Add to the sums of whole hours what they differ from the bills. Raises the store's errors.

    A repetition adds nothing. It also takes back what is added wrongly, because a bill is inserted at this moment.
    """
    from_s, until_s = from_us // 1_000_000, until_us // 1_000_000
    for table, keys, figures in (
        ("usage_hour", "hour, tenant, model", _USAGE),
        ("cost_hour", "hour, tenant, model, pool", _COST),
    ):
        await store.command(
            _CORRECTION.substitute(
                table=table,
                keys=keys,
                figures=", ".join(figures),
                sums=", ".join(f"sum(d.{name}) AS {name}" for name in figures),
                counted=", ".join(f"-{table}.{name} AS {name}" for name in figures),
                window=f"hour >= fromUnixTimestamp({from_s}) AND hour < fromUnixTimestamp({until_s})",
                differs=" OR ".join(f"{name} != 0" for name in figures),
            )
        )
