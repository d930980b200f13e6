-- The saved queries: name, description, defaults of optional parameters, then the SQL. $words are constants of
-- queries.py. Times are microseconds since 1970. Where successes are sampled, a row represents weight requests.
-- An event may arrive twice: what lists or bills single events takes one row of an id.

-- name: find
-- tells: streams by the id of a stream, request or trace
-- default: stream = ''
SELECT stream, min(at_us) AS from_us, max(at_us) AS until_us FROM (
    SELECT stream, toUnixTimestamp64Micro(at) AS at_us FROM requests WHERE $window AND stream IN ({id:String}, {stream:String}) AND stream != ''
    UNION ALL SELECT stream, toUnixTimestamp64Micro(at) FROM requests WHERE $window AND request_id = {id:String}
    UNION ALL SELECT stream, toUnixTimestamp64Micro(at) FROM requests WHERE $window AND id = {id:String}
    UNION ALL SELECT stream, toUnixTimestamp64Micro(at) FROM requests WHERE $window AND trace_id = {id:String}
    UNION ALL SELECT stream, toUnixTimestamp64Micro(at) FROM attempts WHERE $window AND stream IN ({id:String}, {stream:String}) AND stream != ''
    UNION ALL SELECT stream, toUnixTimestamp64Micro(at) FROM attempts WHERE $window AND id = {id:String}
    UNION ALL SELECT stream, toUnixTimestamp64Micro(at) FROM attempts WHERE $window AND trace_id = {id:String}
) GROUP BY stream ORDER BY from_us, stream LIMIT 100;

-- name: readers
-- tells: every reader of a stream; of a refused request, by its own id
-- default: stream = ''
-- default: id = ''
SELECT toUnixTimestamp64Micro(at) AS at_us, id, gateway, role, ended, tenant, wall_us, stream, request_id, trace_id, user_hash, model, adapter, artifact, pool, replica, session_hash, region, dialect, transport, tier, http_status, error_code, finish_reason, placement, queue_position, prompt_tokens, cached_tokens, output_tokens, streamed_tokens, attempts, epochs, first_seq, last_seq, cancel_point, ttft_us, price_micro, weight, scores_json, shifted_to, backlog_ms, regions, asked_model, schema_check, repairs, inputs, inputs_refused, $phases FROM requests
WHERE $window AND if({stream:String} = '', request_id = {id:String} OR requests.id = {id:String} OR trace_id = {id:String}, stream = {stream:String})
ORDER BY requests.at, requests.id LIMIT 1 BY requests.id LIMIT 1000;

-- name: attempts
-- tells: every attempt at a stream
SELECT toUnixTimestamp64Micro(at) AS at_us, id, stream, tenant, model, pool, replica, ended, epoch, attempt, engine, region, hardware, tier, trace_id, waited_us, inbox_us, engine_queue_us, prefill_us, decode_us, check_us, steer_us, inputs_json, queue_estimated, believed_cached_tokens, prompt_tokens, cached_tokens, output_tokens, generated_tokens, reasoning_tokens, finish_reason, error_code, last_seq, billed, price_micro, itl_max_us, token_us FROM attempts WHERE $window AND stream = {stream:String} ORDER BY epoch, attempt, attempts.at LIMIT 1 BY id LIMIT 1000;

-- name: content
-- tells: prompt and completion of a stream, for tenants whose plan allows it
SELECT toUnixTimestamp64Micro(at) AS at_us, tenant, role, ended, first_seq, last_seq, prompt, completion FROM requests
WHERE $window AND stream = {stream:String} AND (prompt != '' OR completion != '') ORDER BY requests.at, requests.id LIMIT 1 BY requests.id LIMIT 1000;

-- name: cohort
-- tells: figures of a cohort: finished requests of a model, prompt size and time, without one stream
-- default: prompt_from = 0
-- default: prompt_until = 1099511627776
-- default: stream = ''
SELECT count() AS members, sum(weight) AS requests,
    quantilesBFloat16Weighted(0.5, 0.95, 0.99)(requests.wall_us, toUInt64(weight)) AS wall_us_q,
    quantilesBFloat16WeightedIf(0.5, 0.95, 0.99)(ttft_us, toUInt64(weight), ttft_us > 0) AS ttft_us_q,
    quantilesBFloat16Weighted(0.5, 0.95, 0.99)(output_tokens, toUInt64(weight)) AS output_tokens_q,
    quantilesBFloat16WeightedIf(0.5, 0.95, 0.99)(decode_us / greatest(output_tokens, 1), toUInt64(weight), output_tokens > 0) AS token_us_q,
    quantilesBFloat16WeightedIf(0.05, 0.5)(cached_tokens / greatest(prompt_tokens, 1), toUInt64(weight), prompt_tokens > 0) AS cached_share_q,
    $quantiles
FROM requests WHERE $window AND ({model:String} = '' OR model = {model:String}) AND $band
    AND role = 'created' AND ended IN ('completed', 'incomplete') AND stream != {stream:String};

-- name: session
-- tells: share of the prompts that a session's earlier requests found cached
-- default: stream = ''
SELECT count() AS members, quantilesBFloat16(0.5)(cached_tokens / prompt_tokens)[1] AS cached_share
FROM requests WHERE $window AND session_hash = {session:String} AND session_hash != '' AND tenant = {tenant:String}
    AND role = 'created' AND prompt_tokens > 0 AND stream != {stream:String};

-- name: fleet_near
-- tells: fleet events of a pool in a time window
SELECT toUnixTimestamp64Micro(at) AS at_us, what, source, pool, replica, state, reason FROM fleet
WHERE $window AND pool = {pool:String} ORDER BY fleet.at, id LIMIT 1000;

-- name: recent
-- tells: the newest requests
-- default: ended = ''
SELECT toUnixTimestamp64Micro(at) AS at_us, id, stream, role, ended, tenant, model, replica, prompt_tokens,
    output_tokens, ttft_us, wall_us, error_code, weight
FROM requests WHERE $window AND $cohort AND ({ended:String} = '' OR ended = {ended:String})
ORDER BY requests.at DESC, id LIMIT 1 BY id LIMIT {top:Int64};

-- name: slow
-- tells: the requests that spent the most time in one phase
-- default: phase = 'wall'
-- default: ended = ''
SELECT toUnixTimestamp64Micro(at) AS at_us, stream, ended, tenant, model, replica, prompt_tokens, output_tokens,
    $phase AS phase_us, ttft_us, requests.wall_us AS wall_us, error_code,
    if(requests.stream = '', requests.id, '') AS id
FROM requests WHERE $window AND $cohort AND ({ended:String} = '' OR ended = {ended:String})
ORDER BY phase_us DESC, stream, id LIMIT 1 BY requests.id LIMIT {top:Int64};

-- name: profile
-- tells: one cohort: requests, outcomes, and the quantiles of each phase
SELECT sum(weight) AS requests, count() AS members, sumIf(weight, ended = 'failed') AS failed,
    sumIf(weight, ended = 'refused') AS refused, sumIf(weight, ended = 'cancelled') AS cancelled,
    sumIf(weight, ended IN ('left', 'stalled', 'drained')) AS left_early,
    quantilesBFloat16WeightedIf(0.5, 0.95, 0.99, 0.92, 0.98)(ttft_us, toUInt64(weight), ttft_us > 0) AS ttft_us_q,
    quantilesBFloat16Weighted(0.5, 0.95, 0.99, 0.92, 0.98)(requests.wall_us, toUInt64(weight)) AS wall_us_q, $quantiles
FROM requests WHERE $window AND $cohort AND role IN ('created', 'refused');

-- name: spent_by_replica
-- tells: mean phases by replica, for requests that took between two times
-- default: by = 'ttft'
SELECT replica, sum(weight) AS requests, $means FROM requests
WHERE $window AND $cohort AND role = 'created'
    AND if({by:String} = 'ttft', ttft_us, requests.wall_us) BETWEEN {least_us:Int64} AND {most_us:Int64}
    AND ({by:String} != 'ttft' OR ttft_us > 0)
GROUP BY replica ORDER BY requests DESC, replica LIMIT 1000;

-- name: ttft_by_minute
-- tells: time to first token by minute
-- default: top = 1440
SELECT toUnixTimestamp(minute) * 1000000 AS minute_us, sum(requests) AS requests,
    round(quantilesTDigestWeightedIfMerge(0.5, 0.9, 0.95, 0.99)(ttft_q)[1] / 1000, 1) AS p50_ms,
    round(quantilesTDigestWeightedIfMerge(0.5, 0.9, 0.95, 0.99)(ttft_q)[4] / 1000, 1) AS p99_ms
FROM requests_minute
WHERE minute >= fromUnixTimestamp(intDiv({from_us:Int64}, 1000000)) AND minute < fromUnixTimestamp(intDiv({until_us:Int64}, 1000000))
    AND ({model:String} = '' OR model = {model:String}) AND ({pool:String} = '' OR pool = {pool:String}) AND role = 'created'
GROUP BY minute ORDER BY minute LIMIT {top:Int64};

-- name: pulse
-- tells: the last minutes: requests, outcomes and time to first token, by minute (the first rows) and by pool
SELECT toUnixTimestamp(minute) * 1000000 AS minute_us, pool, sum(requests_minute.requests) AS requests,
    sumIf(requests_minute.requests, ended = 'failed') AS failed, sumIf(requests_minute.requests, ended = 'refused') AS refused,
    sum(requests_minute.streamed_tokens) AS tokens,
    round(quantilesTDigestWeightedIfMerge(0.5, 0.9, 0.95, 0.99)(ttft_q)[1] / 1000, 1) AS ttft_p50_ms,
    round(quantilesTDigestWeightedIfMerge(0.5, 0.9, 0.95, 0.99)(ttft_q)[3] / 1000, 1) AS ttft_p95_ms,
    round(quantilesTDigestWeightedIfMerge(0.5, 0.9, 0.95, 0.99)(ttft_q)[4] / 1000, 1) AS ttft_p99_ms
FROM requests_minute
WHERE minute >= fromUnixTimestamp(intDiv({from_us:Int64}, 1000000)) AND minute < fromUnixTimestamp(intDiv({until_us:Int64}, 1000000))
    AND role IN ('created', 'refused')
GROUP BY GROUPING SETS ((minute), (pool)) ORDER BY minute_us = 0, minute_us, requests DESC, pool LIMIT 200;

-- name: where_time_goes
-- tells: percent of the time in each phase, by model
SELECT model, sum(weight) AS requests, round(sum(requests.wall_us * weight) / sum(weight) / 1000, 1) AS mean_ms,
    round(100 * sum((gateway_us + admission_us) * weight) / sum(requests.wall_us * weight), 1) AS edge,
    round(100 * sum(pool_queue_us * weight) / sum(requests.wall_us * weight), 1) AS pool_queue,
    round(100 * sum(engine_queue_us * weight) / sum(requests.wall_us * weight), 1) AS engine_queue,
    round(100 * sum(prefill_us * weight) / sum(requests.wall_us * weight), 1) AS prefill,
    round(100 * sum(decode_us * weight) / sum(requests.wall_us * weight), 1) AS decode,
    round(100 * sum(fabric_us * weight) / sum(requests.wall_us * weight), 1) AS fabric,
    round(100 * sum(client_stall_us * weight) / sum(requests.wall_us * weight), 1) AS client_stall,
    round(100 * sum(resume_gap_us * weight) / sum(requests.wall_us * weight), 1) AS resume_gap,
    round(100 * sum(recovery_us * weight) / sum(requests.wall_us * weight), 1) AS recovery,
    round(100 * sum(check_us * weight) / sum(requests.wall_us * weight), 1) AS checks,
    round(100 * sum(steer_us * weight) / sum(requests.wall_us * weight), 1) AS steering
FROM requests WHERE $window AND $cohort AND role != 'refused'
GROUP BY model ORDER BY requests DESC, model LIMIT {top:Int64};

-- name: errors
-- tells: errors: how many, and for how many tenants
SELECT model, ended, error_code, sum(weight) AS requests, uniqExact(tenant) AS tenants,
    toUnixTimestamp64Micro(min(at)) AS first_us, toUnixTimestamp64Micro(max(at)) AS last_us, max(stream) AS example
FROM requests WHERE $window AND $cohort AND error_code != ''
GROUP BY model, ended, error_code ORDER BY requests DESC, model, error_code LIMIT {top:Int64};

-- name: tenants
-- tells: the tenants with the most requests, with their failures and time to first token
SELECT tenant, sum(weight) AS requests, sum(output_tokens * weight) AS output_tokens_sum, sum(price_micro * weight) AS price_micro_sum,
    round(100 * sumIf(weight, ended IN ('failed', 'refused')) / sum(weight), 2) AS failed_percent,
    round(quantilesBFloat16WeightedIf(0.5, 0.99)(ttft_us, toUInt64(weight), ttft_us > 0)[1] / 1000, 1) AS ttft_p50_ms,
    round(quantilesBFloat16WeightedIf(0.5, 0.99)(ttft_us, toUInt64(weight), ttft_us > 0)[2] / 1000, 1) AS ttft_p99_ms
FROM requests WHERE $window AND $cohort AND role IN ('created', 'refused')
GROUP BY tenant ORDER BY requests DESC, tenant LIMIT {top:Int64};

-- name: replicas
-- tells: replicas of a pool compared
SELECT pool, replica, count() AS attempts, round(quantilesBFloat16(0.5, 0.99)(engine_queue_us)[1] / 1000, 1) AS queue_p50_ms,
    round(quantilesBFloat16(0.5, 0.99)(engine_queue_us)[2] / 1000, 1) AS queue_p99_ms,
    round(quantilesBFloat16(0.5)(prefill_us)[1] / 1000, 1) AS prefill_p50_ms,
    round(sum(decode_us) / greatest(sum(generated_tokens), 1) / 1000, 2) AS token_ms,
    sum(generated_tokens) AS tokens
FROM attempts WHERE $window AND $cohort AND ended != 'lost'
GROUP BY pool, replica ORDER BY pool, replica LIMIT {top:Int64};

-- name: token_gaps
-- tells: gaps between tokens by replica; four buckets of the sketch are one doubling
SELECT model, replica, attempts,
    multiIf(b50 < 4, b50, bitShiftLeft(4 + b50 % 4, intDiv(b50, 4) - 1)) / 1000 AS p50_from_ms,
    multiIf(b99 < 4, b99, bitShiftLeft(4 + b99 % 4, intDiv(b99, 4) - 1)) / 1000 AS p99_from_ms, max_ms
FROM (
    SELECT model, replica, attempts, max_ms, arrayCumSum(sketch) AS sums,
        toInt64(arrayFirstIndex(x -> x > 0 AND x >= 0.5 * sums[-1], sums)) - 1 AS b50,
        toInt64(arrayFirstIndex(x -> x > 0 AND x >= 0.99 * sums[-1], sums)) - 1 AS b99
    FROM (
        SELECT model, replica, count() AS attempts, max(itl_max_us) / 1000 AS max_ms, sumForEach(itl_sketch) AS sketch
        FROM attempts WHERE $window AND $cohort AND notEmpty(itl_sketch) GROUP BY model, replica
    )
)
ORDER BY model, replica LIMIT {top:Int64};

-- name: faults
-- tells: replicas that lost streams or handed them over, and the outcome of those streams
SELECT pool, replica, countIf(ended = 'lost') AS lost, countIf(ended = 'handed_over') AS handed_over,
    countIf(ended = 'failed') AS failed, count() AS attempts,
    countIf(ended IN ('lost', 'handed_over') AND stream IN (
        SELECT stream FROM attempts WHERE $window AND billed AND ended = 'completed')) AS completed_elsewhere
FROM attempts WHERE $window AND $cohort
GROUP BY pool, replica HAVING lost + handed_over + failed > 0 ORDER BY lost DESC, replica LIMIT {top:Int64};

-- name: placements
-- tells: placement reasons and their effect
SELECT model, placement, sum(weight) AS requests,
    round(100 * sum(cached_tokens * weight) / greatest(sum(prompt_tokens * weight), 1), 1) AS cached_percent,
    round(quantilesBFloat16WeightedIf(0.5, 0.99)(ttft_us, toUInt64(weight), ttft_us > 0)[1] / 1000, 1) AS ttft_p50_ms,
    round(quantilesBFloat16WeightedIf(0.5, 0.99)(ttft_us, toUInt64(weight), ttft_us > 0)[2] / 1000, 1) AS ttft_p99_ms
FROM requests WHERE $window AND $cohort AND role = 'created' AND placement != ''
GROUP BY model, placement ORDER BY model, requests DESC, placement LIMIT {top:Int64};

-- name: believed
-- tells: expected and real cached prefix tokens
SELECT pool, replica, count() AS attempts, sum(believed_cached_tokens) AS believed, sum(cached_tokens) AS found,
    round(100 * found / greatest(believed, 1), 1) AS found_percent
FROM attempts WHERE $window AND $cohort AND believed_cached_tokens > 0 AND ended != 'lost'
GROUP BY pool, replica ORDER BY found_percent, replica LIMIT {top:Int64};

-- name: cached
-- tells: cached share of the prompts by tenant and model
SELECT tenant, model, sum(weight) AS requests, sum(prompt_tokens * weight) AS prompt_sum,
    round(100 * sum(cached_tokens * weight) / greatest(sum(prompt_tokens * weight), 1), 1) AS cached_percent
FROM requests WHERE $window AND $cohort AND role = 'created'
GROUP BY tenant, model ORDER BY prompt_sum DESC, tenant LIMIT {top:Int64};

-- name: sessions
-- tells: sessions that moved between replicas, and their cached share
SELECT tenant, session_hash, count() AS turns, uniqExact(replica) AS replicas_used,
    round(100 * sum(cached_tokens) / greatest(sum(prompt_tokens), 1), 1) AS cached_percent
FROM requests WHERE $window AND $cohort AND role = 'created' AND session_hash != '' AND replica != ''
GROUP BY tenant, session_hash HAVING turns > 1
ORDER BY replicas_used DESC, cached_percent, session_hash LIMIT {top:Int64};

-- name: stalls
-- tells: tenants whose clients read slowly
SELECT tenant, user_hash, transport, sumIf(weight, client_stall_us > 0) AS stalled, sum(weight) AS readers,
    round(max(client_stall_us) / 1000, 1) AS longest_ms, round(sum(client_stall_us * weight) / 1000, 1) AS total_ms
FROM requests WHERE $window AND $cohort
GROUP BY tenant, user_hash, transport HAVING stalled > 0 ORDER BY total_ms DESC, user_hash LIMIT {top:Int64};

-- name: resumes
-- tells: reconnections of readers, and how long they were away
SELECT region, transport, sumIf(weight, role = 'resumed') AS resumed, sumIf(weight, role = 'created') AS created,
    round(quantilesBFloat16WeightedIf(0.5, 0.99)(resume_gap_us, toUInt64(weight), role = 'resumed')[1] / 1000, 1) AS gap_p50_ms,
    round(quantilesBFloat16WeightedIf(0.5, 0.99)(resume_gap_us, toUInt64(weight), role = 'resumed')[2] / 1000, 1) AS gap_p99_ms
FROM requests WHERE $window AND $cohort GROUP BY region, transport HAVING resumed > 0
ORDER BY resumed DESC, region LIMIT {top:Int64};

-- name: queues
-- tells: waits for a replica by time
-- default: top = 1440
SELECT toUnixTimestamp(toStartOfMinute(at)) * 1000000 AS minute_us, pool, sumIf(weight, placement = 'queued') AS queued,
    sum(weight) AS requests, max(queue_position) AS deepest, round(max(pool_queue_us) / 1000, 1) AS longest_ms,
    sumIf(weight, ended = 'refused') AS refused
FROM requests WHERE $window AND $cohort AND role IN ('created', 'refused')
GROUP BY minute_us, pool HAVING queued + refused > 0 ORDER BY minute_us, pool LIMIT {top:Int64};

-- name: refusals
-- tells: refused requests by tenant and answer
SELECT tenant, tier, error_code, http_status, sum(weight) AS requests, toUnixTimestamp64Micro(max(at)) AS last_us
FROM requests WHERE $window AND $cohort AND ended = 'refused'
GROUP BY tenant, tier, error_code, http_status ORDER BY requests DESC, tenant LIMIT {top:Int64};

-- name: wasted
-- tells: tokens computed that no reader received: after cancellations, and by dead replicas
SELECT model, ended, count() AS attempts, sum(generated_tokens) AS generated, sum(if(billed, output_tokens, 0)) AS kept,
    generated - kept AS wasted
FROM attempts WHERE $window AND $cohort AND ended IN ('cancelled', 'failed', 'lost', 'handed_over')
GROUP BY model, ended ORDER BY wasted DESC, model, ended LIMIT {top:Int64};

-- name: recoveries
-- tells: streams that outlived their replica, and the pause for their readers
SELECT model, sumIf(weight, ended = 'completed') AS completed, sumIf(weight, ended = 'failed') AS failed, sum(weight) AS requests,
    round(quantilesBFloat16Weighted(0.5, 0.99)(recovery_us, toUInt64(weight))[1] / 1000, 1) AS pause_p50_ms,
    round(quantilesBFloat16Weighted(0.5, 0.99)(recovery_us, toUInt64(weight))[2] / 1000, 1) AS pause_p99_ms
FROM requests WHERE $window AND $cohort AND role = 'created' AND (recovery_us > 0 OR requests.attempts > 1)
GROUP BY model ORDER BY requests DESC, model LIMIT {top:Int64};

-- name: structured
-- tells: replies with a JSON schema: how many do not fit, how many were made again, and what checks and repairs take
SELECT model, dialect, sum(weight) AS replies, round(100 * sumIf(weight, schema_check = 'invalid') / replies, 1) AS invalid_percent,
    sumIf(weight, schema_check = 'unchecked') AS unchecked, sumIf(weight, schema_check = 'valid' AND repairs > 0) AS repaired,
    sum(repairs * weight) AS made_again,
    round(quantilesBFloat16WeightedIf(0.5, 0.99)(check_us, toUInt64(weight), repairs = 0)[1] / 1000, 1) AS check_p50_ms,
    round(quantilesBFloat16WeightedIf(0.5, 0.99)(check_us, toUInt64(weight), repairs > 0)[1] / 1000, 1) AS repair_p50_ms,
    round(quantilesBFloat16WeightedIf(0.5, 0.99)(check_us, toUInt64(weight), repairs > 0)[2] / 1000, 1) AS repair_p99_ms
FROM requests WHERE $window AND $cohort AND role = 'created' AND schema_check != ''
GROUP BY model, dialect ORDER BY replies DESC, model, dialect LIMIT {top:Int64};

-- name: steered
-- tells: inputs of clients to running streams: how many were applied and refused, and how long the next answers took
SELECT model, uniqExact(stream) AS streams, countIf(i.2 = 'applied') AS applied, countIf(i.2 = 'refused') AS refused,
    countIf(i.2 = 'applied' AND i.5 = 0) AS unanswered,
    round(quantilesBFloat16(0.5, 0.99)(i.4)[1] / 1000, 1) AS waited_p50_ms,
    round(quantilesBFloat16(0.5, 0.99)(i.4)[2] / 1000, 1) AS waited_p99_ms,
    round(quantilesBFloat16If(0.5, 0.99)(i.4 + i.5, i.5 > 0)[1] / 1000, 1) AS next_token_p50_ms,
    round(quantilesBFloat16If(0.5, 0.99)(i.4 + i.5, i.5 > 0)[2] / 1000, 1) AS next_token_p99_ms
FROM (SELECT model, stream, arrayJoin(inputs) AS i FROM attempts WHERE $window AND $cohort AND inputs_json != '')
GROUP BY model ORDER BY applied DESC, model LIMIT {top:Int64};

-- name: regions
-- tells: requests served in another region, and their cost in time
SELECT requests.region AS from_region, served.region AS to_region, sum(requests.weight) AS requests,
    round(quantilesBFloat16Weighted(0.5)(requests.fabric_us, toUInt64(requests.weight))[1] / 1000, 2) AS fabric_p50_ms,
    round(quantilesBFloat16WeightedIf(0.5)(requests.ttft_us, toUInt64(requests.weight), requests.ttft_us > 0)[1] / 1000, 1) AS ttft_p50_ms
FROM requests INNER JOIN (SELECT stream, any(region) AS region FROM attempts WHERE $window AND billed GROUP BY stream) AS served
    ON requests.stream = served.stream
WHERE requests.at >= fromUnixTimestamp64Micro({from_us:Int64}, 'UTC') AND requests.at < fromUnixTimestamp64Micro({until_us:Int64}, 'UTC')
    AND requests.role = 'created'
GROUP BY from_region, to_region ORDER BY requests DESC, from_region, to_region LIMIT {top:Int64};

-- name: residuals
-- tells: wall time that belongs to no phase
SELECT role, sum(weight) AS readers,
    round(100 * quantilesBFloat16Weighted(0.5, 0.99)(abs(residual_us) / greatest(requests.wall_us, 1), toUInt64(weight))[1], 3) AS p50_percent,
    round(100 * quantilesBFloat16Weighted(0.5, 0.99)(abs(residual_us) / greatest(requests.wall_us, 1), toUInt64(weight))[2], 3) AS p99_percent
FROM requests WHERE $window AND $cohort AND role != 'refused' GROUP BY role ORDER BY readers DESC LIMIT {top:Int64};

-- name: fleet
-- tells: fleet events by kind
SELECT toUnixTimestamp64Micro(at) AS at_us, what, pool, replica, state, source, asked_by, reason FROM fleet
WHERE $window AND ({pool:String} = '' OR pool = {pool:String}) ORDER BY fleet.at DESC, id LIMIT {top:Int64};

-- name: timeline
-- tells: fleet events of a pool in order, with the minutes in which requests were affected
-- default: top = 1000
SELECT at_us, what, replica, state, told_by, asked_by, reason, rested_on FROM (
    SELECT toUnixTimestamp64Micro(at) AS at_us, toString(what) AS what, toString(fleet.replica) AS replica, toString(state) AS state,
        toString(source) AS told_by, toString(fleet.asked_by) AS asked_by, reason,
        arrayStringConcat(arrayMap((k, v) -> concat(k, ' ', toString(v)), mapKeys(figures), mapValues(figures)), ', ') AS rested_on
    FROM fleet WHERE $window AND pool = {pool:String}
    UNION ALL
    SELECT minute_us AS at_us, 'requests' AS what, '' AS replica, '' AS state, 'gateways' AS told_by, '' AS asked_by,
        'of those that ended in this minute' AS reason,
        arrayStringConcat(arrayMap((k, n) -> concat(k, ' ', toString(n)), arrayFilter((k, n) -> n > 0, kinds, counts), arrayFilter(n -> n > 0, counts)), ', ') AS rested_on
    FROM (
        SELECT toInt64(toUnixTimestamp(toStartOfMinute(at))) * 1000000 AS minute_us,
            ['waited in the queue', 'refused', 'failed', 'outlived a replica', 'in all'] AS kinds,
            [sumIf(weight, placement = 'queued'), sumIf(weight, ended = 'refused'), sumIf(weight, ended = 'failed'), sumIf(weight, requests.attempts > 1), sum(weight)] AS counts
        FROM requests WHERE $window AND pool = {pool:String} AND role IN ('created', 'refused') GROUP BY minute_us
    ) WHERE arraySum(counts) > counts[5]
) ORDER BY at_us, what, replica, state LIMIT {top:Int64};

-- name: usage_by_hour
-- tells: billed usage by hour, tenant and model; the hour of the start counts whole, and with exact = 1 each bill once
-- default: exact = 1
-- default: after_us = -1
-- default: after_1 = ''
-- default: after_2 = ''
-- default: top = 10000
SELECT toInt64(toUnixTimestamp(hour)) * 1000000 AS hour_us, tenant, model, argMax(usage.requests, once) AS requests,
    argMax(usage.prompt_tokens, once) AS prompt_tokens,
    argMax(usage.cached_tokens, once) AS cached_tokens,
    argMax(usage.output_tokens, once) AS output_tokens,
    argMax(usage.reasoning_tokens, once) AS reasoning_tokens,
    argMax(usage.price_micro, once) AS price_micro
FROM (
    SELECT hour, tenant, model, false AS once, $usage_sums FROM usage_hour AS bills WHERE $from_hour GROUP BY hour, tenant, model
    UNION ALL
    SELECT hour, tenant, model, true AS once, $usage_sums FROM bills FINAL
    WHERE $from_hour AND {exact:Int64} = 1 AND (bills.requests != 0 OR adjusts) GROUP BY hour, tenant, model
) AS usage WHERE $tenant AND ({model:String} = '' OR model = {model:String})
GROUP BY hour, tenant, model HAVING $after_hour ORDER BY hour, tenant, model LIMIT {top:Int64};

-- name: billed_near_hours
-- tells: billing events of the first seconds of an hour: their streams may have ended in the hour before
-- default: edge_s = 10
-- default: after_us = -1
-- default: after_1 = ''
-- default: after_2 = ''
-- default: top = 10000
SELECT toUnixTimestamp(toStartOfHour(at)) * 1000000 AS hour_us, tenant, model, count() AS requests,
    sum(attempts.prompt_tokens) AS prompt_tokens, sum(attempts.cached_tokens) AS cached_tokens,
    sum(attempts.output_tokens) AS output_tokens, sum(attempts.reasoning_tokens) AS reasoning_tokens
FROM attempts WHERE $window AND billed AND $tenant
    AND at < toStartOfHour(at) + toIntervalSecond({edge_s:Int64})
GROUP BY hour_us, tenant, model HAVING $after_hour ORDER BY hour_us, tenant, model LIMIT {top:Int64};

-- name: tenant_names
-- tells: tenants with requests or bills in a window or in the week before
-- default: after = ''
-- default: top = 10000
SELECT DISTINCT tenant FROM (
    SELECT tenant FROM usage_hour WHERE hour >= fromUnixTimestamp(intDiv({from_us:Int64}, 1000000) - 604800)
        AND hour < fromUnixTimestamp(intDiv({until_us:Int64}, 1000000))
    UNION ALL SELECT tenant FROM requests WHERE $window
) WHERE tenant > {after:String} ORDER BY tenant LIMIT {top:Int64};

-- name: bills
-- tells: streams that ended in a window: figures of engines for each, each event once
-- default: after = ''
-- default: top = 2000
SELECT stream, max(a.tenant) AS tenant, max(a.model) AS model, countIf(a.billed) AS bills, sumIf(a.output_tokens, a.billed) AS billed_output,
    sumIf(a.prompt_tokens, a.billed) AS billed_prompt, sum(a.generated_tokens) AS generated,
    countIf(a.ended = 'lost' OR a.ended = 'failed' AND a.decode_us + a.prefill_us + a.engine_queue_us = 0) AS silent,
    maxIf(a.ended, a.billed) AS ended, maxIf(a.last_seq, a.billed) AS last_seq,
    maxIf(toUnixTimestamp64Micro(a.at), a.billed) AS at_us
FROM (
    SELECT stream, tenant, model, billed, ended, last_seq, prompt_tokens, output_tokens, generated_tokens, decode_us, prefill_us, engine_queue_us, attempts.at AS at
    FROM attempts WHERE stream > {after:String} AND stream IN (
        SELECT stream FROM attempts WHERE $window AND billed AND stream > {after:String}
            AND $tenant GROUP BY stream ORDER BY stream LIMIT {top:Int64})
        AND $around
    LIMIT 1 BY id
) AS a
GROUP BY stream ORDER BY stream;

-- name: shown
-- tells: frames and tokens that each reader received, for streams between two ids
-- default: after = ''
SELECT stream, tenant, model, role, ended, first_seq, last_seq, streamed_tokens, output_tokens, gateway
FROM requests WHERE $around
    AND stream > {after:String} AND stream <= {last:String} AND $tenant AND last_seq > 0
ORDER BY stream, first_seq, requests.at LIMIT 10000;

-- name: unbilled
-- tells: streams that a reader received whole and no engine has billed
-- default: after = ''
-- default: top = 10000
SELECT stream, max(requests.tenant) AS of_tenant, max(requests.model) AS of_model, max(requests.ended) AS last_ended, max(requests.output_tokens) AS told_output,
    max(requests.streamed_tokens) AS streamed, toUnixTimestamp64Micro(max(at)) AS at_us
FROM requests WHERE $window AND stream > {after:String} AND ended IN ('completed', 'cancelled', 'failed', 'incomplete')
    AND $tenant AND stream NOT IN (
    SELECT stream FROM attempts WHERE billed AND stream > {after:String} AND $around)
GROUP BY stream HAVING max(requests.output_tokens) > 0 ORDER BY stream LIMIT {top:Int64};

-- name: arrivals
-- tells: arrivals at a pool by minute: requests, computed prompt tokens, output tokens
SELECT toInt64(toUnixTimestamp(minute)) AS at_s, sum(requests_minute.requests) AS requests,
    sum(requests_minute.prompt_tokens - requests_minute.cached_tokens) AS prompt_tokens, sum(requests_minute.output_tokens) AS output_tokens
FROM requests_minute
WHERE minute >= fromUnixTimestamp(intDiv({from_us:Int64}, 1000000)) AND minute < fromUnixTimestamp(intDiv({until_us:Int64}, 1000000))
    AND pool = {pool:String} AND role IN ('created', 'refused')
GROUP BY at_s ORDER BY at_s LIMIT 9000;

-- name: lengths
-- tells: prompt and output lengths of a pool by route (model, dialect, tier): means and 50th, 90th, 99th percentile
SELECT model, dialect, tier, sum(lengths_hour.requests) AS requests,
    round(sum(lengths_hour.prompt_tokens) / sum(lengths_hour.requests), 1) AS prompt_mean,
    quantilesBFloat16WeightedMerge(0.5, 0.9, 0.99)(prompt_q) AS prompt_q,
    round(sum(lengths_hour.output_tokens) / sum(lengths_hour.requests), 1) AS output_mean,
    quantilesBFloat16WeightedMerge(0.5, 0.9, 0.99)(output_q) AS output_q
FROM lengths_hour
WHERE hour >= fromUnixTimestamp(intDiv({from_us:Int64}, 1000000)) AND hour < fromUnixTimestamp(intDiv({until_us:Int64}, 1000000))
    AND pool = {pool:String}
GROUP BY model, dialect, tier ORDER BY requests DESC, model, dialect, tier LIMIT 64;

-- name: speeds
-- tells: speed of a pool's replicas by decoding sequences: output tokens and prompt tokens per second
SELECT sum(speeds_hour.attempts) AS tries, round(sum(speeds_hour.decoding_us) / sum(speeds_hour.decode_us), 2) AS batch_mean,
    round(sum(speeds_hour.tokens) / sum(speeds_hour.decode_us) * 1000000 * batch_mean, 1) AS tokens_per_s,
    sum(speeds_hour.uncached_tokens) AS uncached_tokens, sum(speeds_hour.prefill_us) AS prefill_us
FROM speeds_hour
WHERE hour >= fromUnixTimestamp(intDiv({from_us:Int64}, 1000000)) AND hour < fromUnixTimestamp(intDiv({until_us:Int64}, 1000000))
    AND pool = {pool:String}
GROUP BY batch ORDER BY batch LIMIT 100;
