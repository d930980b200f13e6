-- Saved queries of the operations page. A step is a whole number of seconds; rows of a step begin at a multiple of it.

-- name: series
-- tells: requests, outcomes and TTFT by time step (the first rows) and by pool, from the roll-ups by minute
-- default: step_s = 60
-- default: ended = ''
SELECT intDiv(toUnixTimestamp(minute), greatest({step_s:Int64}, 60)) * greatest({step_s:Int64}, 60) * 1000000 AS step_us,
    multiIf(grouping(step_us) = 0, 'step', grouping(pool) = 0, 'pool', 'all') AS part, pool, sum(requests_minute.requests) AS requests, sumIf(requests_minute.requests, ended = 'failed') AS failed,
    sumIf(requests_minute.requests, ended = 'refused') AS refused,
    sum(requests_minute.streamed_tokens) AS tokens,
    round(quantilesTDigestWeightedIfMerge(0.5, 0.9, 0.95, 0.99)(ttft_q)[1] / 1000, 1) AS ttft_p50_ms,
    round(quantilesTDigestWeightedIfMerge(0.5, 0.9, 0.95, 0.99)(ttft_q)[3] / 1000, 1) AS ttft_p95_ms,
    round(quantilesTDigestWeightedIfMerge(0.5, 0.9, 0.95, 0.99)(ttft_q)[4] / 1000, 1) AS ttft_p99_ms
FROM requests_minute
WHERE $minutes AND role IN ('created', 'refused') AND $if_model AND $if_ended
GROUP BY GROUPING SETS ((step_us), (pool), ()) ORDER BY part DESC, step_us, requests DESC, pool
LIMIT 2000;

-- name: series_of_tenant
-- tells: the same for one tenant, from its requests: the roll-ups do not know tenants
-- default: step_s = 60
-- default: ended = ''
SELECT intDiv(toUnixTimestamp(requests.at), greatest({step_s:Int64}, 60)) * greatest({step_s:Int64}, 60) * 1000000 AS step_us,
    multiIf(grouping(step_us) = 0, 'step', grouping(pool) = 0, 'pool', 'all') AS part, pool, sum(weight) AS requests, sumIf(weight, ended = 'failed') AS failed, sumIf(weight, ended = 'refused') AS refused,
    sum(requests.streamed_tokens * weight) AS tokens,
    round(quantilesTDigestWeightedIf(0.5, 0.95, 0.99)(ttft_us, toUInt64(weight), ttft_us > 0)[1] / 1000, 1) AS ttft_p50_ms,
    round(quantilesTDigestWeightedIf(0.5, 0.95, 0.99)(ttft_us, toUInt64(weight), ttft_us > 0)[2] / 1000, 1) AS ttft_p95_ms,
    round(quantilesTDigestWeightedIf(0.5, 0.95, 0.99)(ttft_us, toUInt64(weight), ttft_us > 0)[3] / 1000, 1) AS ttft_p99_ms
FROM requests
WHERE $window AND tenant = {tenant:String} AND role IN ('created', 'refused') AND $if_model AND $if_ended
GROUP BY GROUPING SETS ((step_us), (pool), ()) ORDER BY part DESC, step_us, requests DESC, pool
LIMIT 2000;

-- name: series_itl
-- tells: ITL by time step, from the roll-ups by minute: lower bounds of the sketch's buckets, four a doubling
-- default: step_s = 60
SELECT step_us, attempts,
    multiIf(b50 < 4, b50, bitShiftLeft(4 + b50 % 4, intDiv(b50, 4) - 1)) / 1000 AS itl_p50_ms,
    multiIf(b95 < 4, b95, bitShiftLeft(4 + b95 % 4, intDiv(b95, 4) - 1)) / 1000 AS itl_p95_ms,
    multiIf(b99 < 4, b99, bitShiftLeft(4 + b99 % 4, intDiv(b99, 4) - 1)) / 1000 AS itl_p99_ms, itl_max_ms
FROM (
    SELECT step_us, attempts, itl_max_ms, arrayCumSum(sketch) AS sums,
        toInt64(arrayFirstIndex(x -> x > 0 AND x >= 0.5 * sums[-1], sums)) - 1 AS b50,
        toInt64(arrayFirstIndex(x -> x > 0 AND x >= 0.95 * sums[-1], sums)) - 1 AS b95,
        toInt64(arrayFirstIndex(x -> x > 0 AND x >= 0.99 * sums[-1], sums)) - 1 AS b99
    FROM (
        SELECT intDiv(toUnixTimestamp(minute), greatest({step_s:Int64}, 60)) * greatest({step_s:Int64}, 60) * 1000000 AS step_us,
            sum(attempts_minute.attempts) AS attempts, max(attempts_minute.itl_max_us) / 1000 AS itl_max_ms,
            sumForEachMerge(itl_sketch) AS sketch
        FROM attempts_minute WHERE $minutes AND $if_model GROUP BY step_us
    )
)
WHERE b50 >= 0 ORDER BY step_us LIMIT 2000;

-- name: series_itl_of_tenant
-- tells: the same for one tenant, from its attempts
-- default: step_s = 60
SELECT step_us, attempts,
    multiIf(b50 < 4, b50, bitShiftLeft(4 + b50 % 4, intDiv(b50, 4) - 1)) / 1000 AS itl_p50_ms,
    multiIf(b95 < 4, b95, bitShiftLeft(4 + b95 % 4, intDiv(b95, 4) - 1)) / 1000 AS itl_p95_ms,
    multiIf(b99 < 4, b99, bitShiftLeft(4 + b99 % 4, intDiv(b99, 4) - 1)) / 1000 AS itl_p99_ms, itl_max_ms
FROM (
    SELECT step_us, attempts, itl_max_ms, arrayCumSum(sketch) AS sums,
        toInt64(arrayFirstIndex(x -> x > 0 AND x >= 0.5 * sums[-1], sums)) - 1 AS b50,
        toInt64(arrayFirstIndex(x -> x > 0 AND x >= 0.95 * sums[-1], sums)) - 1 AS b95,
        toInt64(arrayFirstIndex(x -> x > 0 AND x >= 0.99 * sums[-1], sums)) - 1 AS b99
    FROM (
        SELECT intDiv(toUnixTimestamp(attempts.at), greatest({step_s:Int64}, 60)) * greatest({step_s:Int64}, 60) * 1000000 AS step_us,
            count() AS attempts, max(attempts.itl_max_us) / 1000 AS itl_max_ms, sumForEach(itl_sketch) AS sketch
        FROM attempts WHERE $window AND tenant = {tenant:String} AND $if_model AND notEmpty(itl_sketch) GROUP BY step_us
    )
)
WHERE b50 >= 0 ORDER BY step_us LIMIT 2000;

-- name: filters
-- tells: the tenants and models with the most requests
SELECT tenant, model, sum(weight) AS requests FROM requests
WHERE $window AND role IN ('created', 'refused')
GROUP BY GROUPING SETS ((tenant), (model)) HAVING tenant != '' OR model != ''
ORDER BY requests DESC, tenant, model LIMIT 400;

-- name: coverage
-- tells: the oldest and newest request, and the oldest minute of the roll-ups; 0: there is none
SELECT count() AS requests, if(count() = 0, 0, toUnixTimestamp64Micro(min(at))) AS oldest_us,
    if(count() = 0, 0, toUnixTimestamp64Micro(max(at))) AS newest_us,
    (SELECT if(count() = 0, 0, toUnixTimestamp(min(minute)) * 1000000) FROM requests_minute) AS rollups_oldest_us
FROM requests;
