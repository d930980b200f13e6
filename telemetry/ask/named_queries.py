"""Named queries of the consumer's HTTP API, beside those of ``queries.py``. ``{name:Type}`` are parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Query:
    sql: str
    about: str


QUERIES: Mapping[str, Query] = {
    "ingest": Query(
        "SELECT topic, partition, argMax(next, at) AS next, argMax(block, at) AS block, "
        "max(at) AS inserted_at FROM (SELECT *, inserted_at AS at FROM ingest_state) GROUP BY topic, partition "
        "ORDER BY topic, partition",
        "how far each partition of the log has been inserted",
    ),
    "replicas": Query(
        "SELECT pool, replica, at, what, state, reason FROM replicas_latest FINAL ORDER BY pool, replica",
        "what was last heard of each replica",
    ),
    "usage": Query(
        "SELECT hour, tenant, model, sum(requests) AS requests, sum(prompt_tokens) AS prompt_tokens, "
        "sum(cached_tokens) AS cached_tokens, sum(output_tokens) AS output_tokens, "
        "sum(reasoning_tokens) AS reasoning_tokens, sum(price_micro) AS price_micro FROM usage_hour "
        "WHERE hour >= {since:DateTime('UTC')} AND hour < {until:DateTime('UTC')} "
        "GROUP BY hour, tenant, model ORDER BY hour, tenant, model",
        "what is billed, by hour, tenant and model",
    ),
}
