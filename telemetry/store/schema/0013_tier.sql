-- The tier of each bill. Bills of earlier releases have none.

ALTER TABLE bills ADD COLUMN IF NOT EXISTS tier LowCardinality(String);

ALTER TABLE bills_feed MODIFY QUERY
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
    attempts.gpu_cost_micro AS gpu_cost_micro,
    attempts.tier AS tier
FROM attempts
WHERE billed OR attempts.gpu_us > 0;
