-- Usage by key, user, session and endpoint, and what it cost on the GPU.

ALTER TABLE attempts
    ADD COLUMN IF NOT EXISTS key LowCardinality(String),
    ADD COLUMN IF NOT EXISTS user_hash String CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS session_hash String CODEC(ZSTD(1)),
    ADD COLUMN IF NOT EXISTS endpoint LowCardinality(String),
    ADD COLUMN IF NOT EXISTS gpu_us Int64 CODEC(T64, ZSTD(1)),
    ADD COLUMN IF NOT EXISTS gpu_cost_micro Int64 CODEC(T64, ZSTD(1));

-- One row for each event of an attempt that is billed or used a GPU. A row of an event that arrives twice replaces the
-- first one, so a query with FINAL counts each bill once. Rows of lost bills (adjusts) stand for many requests of an
-- hour; their id makes them unique in the same way.
CREATE TABLE IF NOT EXISTS bills
(
    hour DateTime('UTC') CODEC(Delta, ZSTD(1)),
    tenant LowCardinality(String),
    model LowCardinality(String),
    key LowCardinality(String),
    user_hash String CODEC(ZSTD(1)),
    session_hash String CODEC(ZSTD(1)),
    endpoint LowCardinality(String),
    id String CODEC(ZSTD(1)),
    pool LowCardinality(String),
    adjusts Bool,
    requests Int64 CODEC(T64, ZSTD(1)),
    prompt_tokens Int64 CODEC(T64, ZSTD(1)),
    cached_tokens Int64 CODEC(T64, ZSTD(1)),
    output_tokens Int64 CODEC(T64, ZSTD(1)),
    reasoning_tokens Int64 CODEC(T64, ZSTD(1)),
    price_micro Int64 CODEC(T64, ZSTD(1)),
    gpu_us Int64 CODEC(T64, ZSTD(1)),
    gpu_cost_micro Int64 CODEC(T64, ZSTD(1))
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMM(hour)
ORDER BY (tenant, hour, model, key, user_hash, session_hash, endpoint, id)
TTL hour + INTERVAL 400 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE MATERIALIZED VIEW IF NOT EXISTS bills_feed TO bills AS
SELECT
    toStartOfHour(toDateTime(at, 'UTC')) AS hour,
    tenant, model, key, user_hash, session_hash, endpoint, id, pool,
    false AS adjusts,
    toInt64(billed) AS requests,
    if(billed, attempts.prompt_tokens, 0) AS prompt_tokens,
    if(billed, attempts.cached_tokens, 0) AS cached_tokens,
    if(billed, attempts.output_tokens, 0) AS output_tokens,
    if(billed, attempts.reasoning_tokens, 0) AS reasoning_tokens,
    attempts.price_micro AS price_micro,
    attempts.gpu_us AS gpu_us,
    attempts.gpu_cost_micro AS gpu_cost_micro
FROM attempts
WHERE billed OR attempts.gpu_us > 0;

-- Bills of earlier releases. A row that the view has made too is replaced, not counted twice.
INSERT INTO bills
SELECT
    toStartOfHour(toDateTime(at, 'UTC')), tenant, model, key, user_hash, session_hash, endpoint, id, pool, false,
    1, prompt_tokens, cached_tokens, output_tokens, reasoning_tokens, price_micro, gpu_us, gpu_cost_micro
FROM attempts
WHERE billed;

-- Whole-fleet sums over long ranges, by tenant and model.
CREATE TABLE IF NOT EXISTS cost_hour
(
    hour DateTime('UTC'),
    tenant LowCardinality(String),
    model LowCardinality(String),
    pool LowCardinality(String),
    gpu_us Int64,
    gpu_cost_micro Int64
)
ENGINE = SummingMergeTree((gpu_us, gpu_cost_micro))
PARTITION BY toYYYYMM(hour)
ORDER BY (tenant, model, pool, hour)
SETTINGS non_replicated_deduplication_window = 10000;

CREATE MATERIALIZED VIEW IF NOT EXISTS cost_hour_feed TO cost_hour AS
SELECT
    toStartOfHour(toDateTime(at, 'UTC')) AS hour, tenant, model, pool,
    sum(attempts.gpu_us) AS gpu_us,
    sum(attempts.gpu_cost_micro) AS gpu_cost_micro
FROM attempts
WHERE attempts.gpu_us > 0
GROUP BY hour, tenant, model, pool;

-- Rows of lost bills go into the sums by hour as well.
CREATE MATERIALIZED VIEW IF NOT EXISTS usage_hour_adjusted_feed TO usage_hour AS
SELECT
    hour, tenant, model,
    sum(bills.requests) AS requests,
    sum(bills.prompt_tokens) AS prompt_tokens,
    sum(bills.cached_tokens) AS cached_tokens,
    sum(bills.output_tokens) AS output_tokens,
    sum(bills.reasoning_tokens) AS reasoning_tokens,
    sum(bills.price_micro) AS price_micro
FROM bills
WHERE adjusts
GROUP BY hour, tenant, model;

-- The moment before which all delivered events of a partition are inserted, as its consumer reports it.
CREATE TABLE IF NOT EXISTS ingest_progress
(
    topic LowCardinality(String),
    partition Int32,
    complete_until DateTime64(6, 'UTC'),
    written_at DateTime64(3, 'UTC') DEFAULT now64(3)
)
ENGINE = ReplacingMergeTree(written_at)
ORDER BY (topic, partition)
TTL toDateTime(written_at) + INTERVAL 7 DAY
SETTINGS non_replicated_deduplication_window = 10000;
