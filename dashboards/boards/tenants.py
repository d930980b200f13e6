"""Usage and cost by tenant."""

from __future__ import annotations

from dashboards.build import Board, Panel, Sql

_HOURS = "hour >= toStartOfHour($__fromTime) AND hour <= $__toTime"
_AT = "at >= $__fromTime AND at <= $__toTime"
_TTFT = "(ttft_us, toUInt64(weight), ttft_us > 0)"

TENANTS = Board(
    "stream-gw-tenants",
    "stream-gw: tenants and cost",
    [
        Panel(
            "Price", Sql(
                "SELECT hour AS time, tenant, sum(price_micro) / 1e6 AS cost FROM usage_hour "
                f"WHERE {_HOURS} GROUP BY time, tenant ORDER BY time"
            ), "currencyUSD", about="In the currency of the prices in the keys file.",
        ),
        Panel(
            "Output tokens", Sql(
                "SELECT hour AS time, tenant, sum(output_tokens) AS tokens FROM usage_hour "
                f"WHERE {_HOURS} GROUP BY time, tenant ORDER BY time"
            ),
        ),
        Panel(
            "Requests", Sql(
                "SELECT hour AS time, tenant, sum(requests) AS requests FROM usage_hour "
                f"WHERE {_HOURS} GROUP BY time, tenant ORDER BY time"
            ),
        ),
        Panel(
            "Refused requests", Sql(
                "SELECT toStartOfMinute(at) AS time, concat(tenant, ' ', error_code) AS what, "
                f"sum(weight) AS requests FROM requests WHERE {_AT} AND ended = 'refused' "
                "GROUP BY time, what ORDER BY time"
            ), about="By tenant and reason. rate_limit_exceeded, budget_exceeded: by the tenant's plan.",
        ),
        Panel(
            "Budgets", Sql(
                f"SELECT at, tenant, state AS budget, what FROM fleet WHERE {_AT} "
                "AND what IN ('budget_warning', 'budget_exceeded', 'velocity_trip') ORDER BY at DESC LIMIT 200"
            ), kind="table", about="Budgets that are used to 80 %, or used up; each once in its period.",
            only="for plans with budgets",
        ),
        Panel(
            "GPU cost", Sql(
                "SELECT hour AS time, tenant, sum(gpu_cost_micro) / 1e6 AS cost FROM cost_hour "
                f"WHERE {_HOURS} GROUP BY time, tenant ORDER BY time"
            ), "currencyUSD", about="Cost of busy time, by STREAM_GW_GPU_HOUR_MICRO. Idle time is not included.",
        ),
        Panel(
            "Margin", Sql(
                "SELECT hour AS time, tenant, (sum(price_micro) - sum(gpu_cost_micro)) / 1e6 AS margin FROM ("
                "SELECT hour, tenant, price_micro, 0 AS gpu_cost_micro FROM usage_hour UNION ALL "
                "SELECT hour, tenant, 0 AS price_micro, gpu_cost_micro FROM cost_hour) "
                f"WHERE {_HOURS} GROUP BY time, tenant ORDER BY time"
            ), "currencyUSD", about="Price less GPU cost of busy time.",
        ),
        Panel(
            "Usage and cost by tenant and model", Sql(
                "SELECT tenant, model, sum(requests) AS requests, sum(prompt_tokens) AS prompt, "
                "sum(cached_tokens) AS cached, sum(output_tokens) AS output, sum(reasoning_tokens) AS reasoning, "
                f"sum(price_micro) / 1e6 AS cost FROM usage_hour WHERE {_HOURS} "
                "GROUP BY tenant, model ORDER BY cost DESC, output DESC LIMIT 200"
            ), kind="table",
        ),
        Panel(
            "Failures and time to first token by tenant", Sql(
                "SELECT tenant, sum(weight) AS requests, "
                "round(sumIf(weight, ended IN ('failed', 'refused')) / requests, 4) AS failed_share, "
                f"round(quantileBFloat16WeightedIf(0.5){_TTFT} / 1000, 1) AS ttft_p50_ms, "
                f"round(quantileBFloat16WeightedIf(0.99){_TTFT} / 1000, 1) AS ttft_p99_ms "
                f"FROM requests WHERE {_AT} AND role IN ('created', 'refused') "
                "GROUP BY tenant ORDER BY requests DESC LIMIT 200"
            ), kind="table",
        ),
    ],
)  # fmt: skip
