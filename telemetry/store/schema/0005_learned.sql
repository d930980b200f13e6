-- What scaling learns from: how long prompts and answers are by route, and how fast tokens come by how many sequences
-- share the replica.

ALTER TABLE attempts ADD COLUMN IF NOT EXISTS decoding_us Int64 CODEC(T64, ZSTD(1)) AFTER token_us;

-- Of readers who made a stream that ran to its end. Quantiles are of bfloat16 sketches: the same whatever the order.
CREATE TABLE IF NOT EXISTS lengths_hour
(
    hour DateTime('UTC'),
    pool LowCardinality(String),
    model LowCardinality(String),
    dialect LowCardinality(String),
    tier LowCardinality(String),
    requests SimpleAggregateFunction(sum, Int64),
    prompt_tokens SimpleAggregateFunction(sum, Int64),
    output_tokens SimpleAggregateFunction(sum, Int64),
    prompt_q AggregateFunction(quantilesBFloat16Weighted(0.5, 0.9, 0.99), Int64, UInt64),
    output_q AggregateFunction(quantilesBFloat16Weighted(0.5, 0.9, 0.99), Int64, UInt64)
)
ENGINE = AggregatingMergeTree
PARTITION BY toYYYYMM(hour)
ORDER BY (pool, model, dialect, tier, hour)
TTL hour + INTERVAL 400 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS lengths_hour_feed TO lengths_hour AS
SELECT
    toStartOfHour(toDateTime(at, 'UTC')) AS hour,
    pool, model, dialect, tier,
    sum(weight) AS requests,
    sum(requests.prompt_tokens * weight) AS prompt_tokens,
    sum(requests.output_tokens * weight) AS output_tokens,
    quantilesBFloat16WeightedState(0.5, 0.9, 0.99)(requests.prompt_tokens, toUInt64(weight)) AS prompt_q,
    quantilesBFloat16WeightedState(0.5, 0.9, 0.99)(requests.output_tokens, toUInt64(weight)) AS output_q
FROM requests
WHERE role = 'created' AND ended IN ('completed', 'incomplete', 'cancelled')
GROUP BY hour, pool, model, dialect, tier;

-- batch: how many sequences decoded at once, two steps to a doubling; decoding_us / decode_us is their mean. tokens: those
-- after the first. uncached_tokens: of prompts, what prefill_us computed.
CREATE TABLE IF NOT EXISTS speeds_hour
(
    hour DateTime('UTC'),
    pool LowCardinality(String),
    model LowCardinality(String),
    hardware LowCardinality(String),
    batch Int64,
    attempts Int64,
    tokens Int64,
    decode_us Int64,
    decoding_us Int64,
    uncached_tokens Int64,
    prefill_us Int64
)
ENGINE = SummingMergeTree((attempts, tokens, decode_us, decoding_us, uncached_tokens, prefill_us))
PARTITION BY toYYYYMM(hour)
ORDER BY (pool, model, hardware, batch, hour)
TTL hour + INTERVAL 400 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS speeds_hour_feed TO speeds_hour AS
SELECT
    toStartOfHour(toDateTime(at, 'UTC')) AS hour,
    pool, model, hardware,
    toInt64(round(exp2(round(2 * log2(greatest(attempts.decoding_us / attempts.decode_us, 1))) / 2))) AS batch,
    toInt64(count()) AS attempts,
    sum(generated_tokens - 1) AS tokens,
    sum(attempts.decode_us) AS decode_us,
    sum(attempts.decoding_us) AS decoding_us,
    sum(greatest(prompt_tokens - cached_tokens, 0)) AS uncached_tokens,
    sum(attempts.prefill_us) AS prefill_us
FROM attempts
WHERE attempts.decoding_us > 0 AND attempts.decode_us > 0 AND generated_tokens > 1
GROUP BY hour, pool, model, hardware, batch;
