-- What was told, a row an event. Every number that is an integer is Int64: one rule decides what fits.
-- _topic, _partition and _offset say where in the log the row came from; the deduplication window makes a block that is
-- inserted again under its name a block inserted once.

CREATE TABLE IF NOT EXISTS requests
(
    at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    id String CODEC(ZSTD(1)),
    gateway LowCardinality(String),
    role LowCardinality(String),
    ended LowCardinality(String),
    tenant LowCardinality(String),
    wall_us Int64 CODEC(T64, ZSTD(1)),
    v Int64 CODEC(T64, ZSTD(1)),
    stream String CODEC(ZSTD(1)),
    request_id String CODEC(ZSTD(1)),
    trace_id String CODEC(ZSTD(1)),
    user_hash String CODEC(ZSTD(1)),
    model LowCardinality(String),
    adapter LowCardinality(String),
    artifact LowCardinality(String),
    pool LowCardinality(String),
    replica LowCardinality(String),
    session_hash String CODEC(ZSTD(1)),
    region LowCardinality(String),
    dialect LowCardinality(String),
    transport LowCardinality(String),
    tier LowCardinality(String),
    http_status Int64 CODEC(T64, ZSTD(1)),
    error_code LowCardinality(String),
    finish_reason LowCardinality(String),
    placement LowCardinality(String),
    queue_position Int64 CODEC(T64, ZSTD(1)),
    prompt_tokens Int64 CODEC(T64, ZSTD(1)),
    cached_tokens Int64 CODEC(T64, ZSTD(1)),
    output_tokens Int64 CODEC(T64, ZSTD(1)),
    streamed_tokens Int64 CODEC(T64, ZSTD(1)),
    attempts Int64 CODEC(T64, ZSTD(1)),
    epochs Int64 CODEC(T64, ZSTD(1)),
    first_seq Int64 CODEC(T64, ZSTD(1)),
    last_seq Int64 CODEC(T64, ZSTD(1)),
    cancel_point String CODEC(ZSTD(1)),
    ttft_us Int64 CODEC(T64, ZSTD(1)),
    price_micro Int64 CODEC(T64, ZSTD(1)),
    weight Int64 CODEC(T64, ZSTD(1)),
    prompt String CODEC(ZSTD(3)),
    completion String CODEC(ZSTD(3)),
    gateway_us Int64 CODEC(T64, ZSTD(1)),
    admission_us Int64 CODEC(T64, ZSTD(1)),
    pool_queue_us Int64 CODEC(T64, ZSTD(1)),
    engine_queue_us Int64 CODEC(T64, ZSTD(1)),
    prefill_us Int64 CODEC(T64, ZSTD(1)),
    decode_us Int64 CODEC(T64, ZSTD(1)),
    fabric_us Int64 CODEC(T64, ZSTD(1)),
    client_stall_us Int64 CODEC(T64, ZSTD(1)),
    resume_gap_us Int64 CODEC(T64, ZSTD(1)),
    recovery_us Int64 CODEC(T64, ZSTD(1)),
    residual_us Int64 CODEC(T64, ZSTD(1)),
    scores_json String CODEC(ZSTD(1)),
    scores Array(Tuple(replica String, score_ms Float64, matched_tokens Int64, in_flight Int64, load_ms Float64, barred String))
        ALIAS JSONExtract(scores_json, 'Array(Tuple(replica String, score_ms Float64, matched_tokens Int64, in_flight Int64, load_ms Float64, barred String))'),
    _topic LowCardinality(String),
    _partition Int32 CODEC(T64, ZSTD(1)),
    _offset Int64 CODEC(Delta, ZSTD(1)),
    INDEX by_stream stream TYPE bloom_filter(0.001) GRANULARITY 1,
    INDEX by_id id TYPE bloom_filter(0.001) GRANULARITY 1,
    INDEX by_request_id request_id TYPE bloom_filter(0.001) GRANULARITY 1,
    INDEX by_trace trace_id TYPE bloom_filter(0.001) GRANULARITY 1
)
ENGINE = MergeTree
PARTITION BY toDate(at)
ORDER BY (model, tenant, toStartOfMinute(at), at)
TTL toDateTime(at) + INTERVAL 30 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE TABLE IF NOT EXISTS attempts
(
    at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    id String CODEC(ZSTD(1)),
    stream String CODEC(ZSTD(1)),
    tenant LowCardinality(String),
    model LowCardinality(String),
    pool LowCardinality(String),
    replica LowCardinality(String),
    ended LowCardinality(String),
    v Int64 CODEC(T64, ZSTD(1)),
    epoch Int64 CODEC(T64, ZSTD(1)),
    attempt Int64 CODEC(T64, ZSTD(1)),
    engine LowCardinality(String),
    region LowCardinality(String),
    hardware LowCardinality(String),
    tier LowCardinality(String),
    trace_id String CODEC(ZSTD(1)),
    waited_us Int64 CODEC(T64, ZSTD(1)),
    inbox_us Int64 CODEC(T64, ZSTD(1)),
    engine_queue_us Int64 CODEC(T64, ZSTD(1)),
    prefill_us Int64 CODEC(T64, ZSTD(1)),
    decode_us Int64 CODEC(T64, ZSTD(1)),
    queue_estimated Bool,
    believed_cached_tokens Int64 CODEC(T64, ZSTD(1)),
    prompt_tokens Int64 CODEC(T64, ZSTD(1)),
    cached_tokens Int64 CODEC(T64, ZSTD(1)),
    output_tokens Int64 CODEC(T64, ZSTD(1)),
    generated_tokens Int64 CODEC(T64, ZSTD(1)),
    reasoning_tokens Int64 CODEC(T64, ZSTD(1)),
    finish_reason LowCardinality(String),
    error_code LowCardinality(String),
    last_seq Int64 CODEC(T64, ZSTD(1)),
    billed Bool,
    price_micro Int64 CODEC(T64, ZSTD(1)),
    itl_sketch Array(Int64) CODEC(ZSTD(1)),
    itl_max_us Int64 CODEC(T64, ZSTD(1)),
    token_us Array(Int64) CODEC(ZSTD(1)),
    _topic LowCardinality(String),
    _partition Int32 CODEC(T64, ZSTD(1)),
    _offset Int64 CODEC(Delta, ZSTD(1)),
    INDEX by_stream stream TYPE bloom_filter(0.001) GRANULARITY 1,
    INDEX by_id id TYPE bloom_filter(0.001) GRANULARITY 1
)
ENGINE = MergeTree
PARTITION BY toDate(at)
ORDER BY (model, tenant, toStartOfMinute(at), at)
TTL toDateTime(at) + INTERVAL 30 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

CREATE TABLE IF NOT EXISTS fleet
(
    at DateTime64(6, 'UTC') CODEC(Delta, ZSTD(1)),
    id String CODEC(ZSTD(1)),
    what LowCardinality(String),
    source LowCardinality(String),
    v Int64 CODEC(T64, ZSTD(1)),
    pool LowCardinality(String),
    replica LowCardinality(String),
    state LowCardinality(String),
    reason String CODEC(ZSTD(1)),
    figures Map(String, Float64) CODEC(ZSTD(1)),
    _topic LowCardinality(String),
    _partition Int32 CODEC(T64, ZSTD(1)),
    _offset Int64 CODEC(Delta, ZSTD(1)),
    INDEX by_id id TYPE bloom_filter(0.001) GRANULARITY 1
)
ENGINE = MergeTree
PARTITION BY toDate(at)
ORDER BY (pool, what, toStartOfMinute(at), at)
TTL toDateTime(at) + INTERVAL 30 DAY
SETTINGS non_replicated_deduplication_window = 10000, ttl_only_drop_parts = 1;

-- Up to where each partition of the log has been inserted. A record of it, for people and for a log whose consumer group
-- was lost; what decides is the group's committed offset and the range pending beside it.
CREATE TABLE IF NOT EXISTS ingest_state
(
    topic LowCardinality(String),
    partition Int32,
    next Int64,
    block String,
    rows Int64,
    poison Int64,
    inserted_at DateTime64(3, 'UTC') DEFAULT now64(3)
)
ENGINE = ReplacingMergeTree(inserted_at)
ORDER BY (topic, partition);
