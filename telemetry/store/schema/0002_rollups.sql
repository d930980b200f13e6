-- Sums and quantiles by minute and hour, fed by materialized views. Each target has a deduplication window of its own:
-- without one a block that is inserted again is dropped from the raw table and counted twice here.
-- The request figures are weighted: a sampled request stands for so many like it.

CREATE TABLE IF NOT EXISTS requests_minute
(
    minute DateTime('UTC'),
    model LowCardinality(String),
    pool LowCardinality(String),
    tier LowCardinality(String),
    ended LowCardinality(String),
    role LowCardinality(String),
    requests SimpleAggregateFunction(sum, Int64),
    events SimpleAggregateFunction(sum, Int64),
    prompt_tokens SimpleAggregateFunction(sum, Int64),
    cached_tokens SimpleAggregateFunction(sum, Int64),
    output_tokens SimpleAggregateFunction(sum, Int64),
    streamed_tokens SimpleAggregateFunction(sum, Int64),
    price_micro SimpleAggregateFunction(sum, Int64),
    wall_us SimpleAggregateFunction(sum, Int64),
    ttft_q AggregateFunction(quantilesTDigestWeightedIf(0.5, 0.9, 0.95, 0.99), Int64, UInt64, UInt8),
    wall_q AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Int64, UInt64),
    gateway_q AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Int64, UInt64),
    admission_q AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Int64, UInt64),
    pool_queue_q AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Int64, UInt64),
    engine_queue_q AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Int64, UInt64),
    prefill_q AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Int64, UInt64),
    decode_q AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Int64, UInt64),
    fabric_q AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Int64, UInt64),
    client_stall_q AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Int64, UInt64),
    resume_gap_q AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Int64, UInt64),
    recovery_q AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Int64, UInt64),
    residual_q AggregateFunction(quantilesTDigestWeighted(0.5, 0.9, 0.95, 0.99), Int64, UInt64)
)
ENGINE = AggregatingMergeTree
PARTITION BY toYYYYMM(minute)
ORDER BY (model, pool, tier, ended, role, minute)
TTL minute + INTERVAL 400 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS requests_minute_feed TO requests_minute AS
SELECT
    toStartOfMinute(toDateTime(at, 'UTC')) AS minute,
    model, pool, tier, ended, role,
    sum(weight) AS requests,
    toInt64(count()) AS events,
    sum(requests.prompt_tokens * weight) AS prompt_tokens,
    sum(requests.cached_tokens * weight) AS cached_tokens,
    sum(requests.output_tokens * weight) AS output_tokens,
    sum(requests.streamed_tokens * weight) AS streamed_tokens,
    sum(requests.price_micro * weight) AS price_micro,
    sum(requests.wall_us * weight) AS wall_us,
    quantilesTDigestWeightedIfState(0.5, 0.9, 0.95, 0.99)(ttft_us, toUInt64(weight), ttft_us > 0) AS ttft_q,
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(requests.wall_us, toUInt64(weight)) AS wall_q,
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(gateway_us, toUInt64(weight)) AS gateway_q,
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(admission_us, toUInt64(weight)) AS admission_q,
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(pool_queue_us, toUInt64(weight)) AS pool_queue_q,
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(engine_queue_us, toUInt64(weight)) AS engine_queue_q,
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(prefill_us, toUInt64(weight)) AS prefill_q,
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(decode_us, toUInt64(weight)) AS decode_q,
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(fabric_us, toUInt64(weight)) AS fabric_q,
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(client_stall_us, toUInt64(weight)) AS client_stall_q,
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(resume_gap_us, toUInt64(weight)) AS resume_gap_q,
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(recovery_us, toUInt64(weight)) AS recovery_q,
    quantilesTDigestWeightedState(0.5, 0.9, 0.95, 0.99)(residual_us, toUInt64(weight)) AS residual_q
FROM requests
GROUP BY minute, model, pool, tier, ended, role;

CREATE TABLE IF NOT EXISTS attempts_minute
(
    minute DateTime('UTC'),
    model LowCardinality(String),
    pool LowCardinality(String),
    replica LowCardinality(String),
    ended LowCardinality(String),
    attempts SimpleAggregateFunction(sum, Int64),
    prompt_tokens SimpleAggregateFunction(sum, Int64),
    cached_tokens SimpleAggregateFunction(sum, Int64),
    output_tokens SimpleAggregateFunction(sum, Int64),
    generated_tokens SimpleAggregateFunction(sum, Int64),
    reasoning_tokens SimpleAggregateFunction(sum, Int64),
    waited_us SimpleAggregateFunction(sum, Int64),
    inbox_us SimpleAggregateFunction(sum, Int64),
    engine_queue_us SimpleAggregateFunction(sum, Int64),
    prefill_us SimpleAggregateFunction(sum, Int64),
    decode_us SimpleAggregateFunction(sum, Int64),
    itl_max_us SimpleAggregateFunction(max, Int64),
    itl_sketch AggregateFunction(sumForEach, Array(Int64))
)
ENGINE = AggregatingMergeTree
PARTITION BY toYYYYMM(minute)
ORDER BY (model, pool, replica, ended, minute)
TTL minute + INTERVAL 400 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS attempts_minute_feed TO attempts_minute AS
SELECT
    toStartOfMinute(toDateTime(at, 'UTC')) AS minute,
    model, pool, replica, ended,
    toInt64(count()) AS attempts,
    sum(attempts.prompt_tokens) AS prompt_tokens,
    sum(attempts.cached_tokens) AS cached_tokens,
    sum(attempts.output_tokens) AS output_tokens,
    sum(attempts.generated_tokens) AS generated_tokens,
    sum(attempts.reasoning_tokens) AS reasoning_tokens,
    sum(attempts.waited_us) AS waited_us,
    sum(attempts.inbox_us) AS inbox_us,
    sum(attempts.engine_queue_us) AS engine_queue_us,
    sum(attempts.prefill_us) AS prefill_us,
    sum(attempts.decode_us) AS decode_us,
    max(attempts.itl_max_us) AS itl_max_us,
    sumForEachState(attempts.itl_sketch) AS itl_sketch
FROM attempts
GROUP BY minute, model, pool, replica, ended;

-- The bill: only attempts that are billed, of which there is one a stream. Kept for good.
CREATE TABLE IF NOT EXISTS usage_hour
(
    hour DateTime('UTC'),
    tenant LowCardinality(String),
    model LowCardinality(String),
    requests Int64,
    prompt_tokens Int64,
    cached_tokens Int64,
    output_tokens Int64,
    reasoning_tokens Int64,
    price_micro Int64
)
ENGINE = SummingMergeTree((requests, prompt_tokens, cached_tokens, output_tokens, reasoning_tokens, price_micro))
PARTITION BY toYYYYMM(hour)
ORDER BY (tenant, model, hour)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE MATERIALIZED VIEW IF NOT EXISTS usage_hour_feed TO usage_hour AS
SELECT
    toStartOfHour(toDateTime(at, 'UTC')) AS hour,
    tenant, model,
    toInt64(count()) AS requests,
    sum(attempts.prompt_tokens) AS prompt_tokens,
    sum(attempts.cached_tokens) AS cached_tokens,
    sum(attempts.output_tokens) AS output_tokens,
    sum(attempts.reasoning_tokens) AS reasoning_tokens,
    sum(attempts.price_micro) AS price_micro
FROM attempts
WHERE billed
GROUP BY hour, tenant, model;

-- What was last heard of each replica.
CREATE TABLE IF NOT EXISTS replicas_latest
(
    pool LowCardinality(String),
    replica LowCardinality(String),
    at DateTime64(6, 'UTC'),
    what LowCardinality(String),
    state LowCardinality(String),
    source LowCardinality(String),
    reason String,
    figures Map(String, Float64)
)
ENGINE = ReplacingMergeTree(at)
ORDER BY (pool, replica)
TTL toDateTime(at) + INTERVAL 30 DAY
SETTINGS non_replicated_deduplication_window = 10000;

CREATE MATERIALIZED VIEW IF NOT EXISTS replicas_latest_feed TO replicas_latest AS
SELECT pool, replica, at, what, state, source, reason, figures
FROM fleet
WHERE replica != '' AND what IN ('lease', 'drain', 'dead');
