-- Saved queries of usage, in the form of saved.sql. A group is one of the dimensions of queries.py.

-- name: usage_groups
-- tells: billed usage and its GPU cost in groups, each bill once; group_1 and group_2 name the dimensions
-- default: group_1 = 'model'
-- default: group_2 = ''
-- default: bucket = ''
-- default: key = ''
-- default: user = ''
-- default: after_us = -1
-- default: after_1 = ''
-- default: after_2 = ''
-- default: top = 1000
SELECT $bucket AS bucket_us, $group_1 AS name_1, $group_2 AS name_2, $usage_sums,
    sum(bills.gpu_us) AS gpu_us, sum(bills.gpu_cost_micro) AS gpu_cost_micro
FROM bills FINAL WHERE $hours AND $tenant AND ({model:String} = '' OR model = {model:String})
    AND ({key:String} = '' OR key = {key:String}) AND ({user:String} = '' OR user_hash = {user:String})
GROUP BY bucket_us, name_1, name_2 HAVING $after_group
ORDER BY bucket_us, name_1, name_2 LIMIT {top:Int64};

-- name: usage_groups_long
-- tells: as usage_groups, for long ranges, by model and tenant only, from the sums by hour
-- default: group_1 = 'model'
-- default: group_2 = ''
-- default: bucket = ''
-- default: after_us = -1
-- default: after_1 = ''
-- default: after_2 = ''
-- default: top = 1000
SELECT $bucket AS bucket_us, $group_long_1 AS name_1, $group_long_2 AS name_2, $usage_sums,
    sum(bills.gpu_us) AS gpu_us, sum(bills.gpu_cost_micro) AS gpu_cost_micro
FROM (
    SELECT hour, tenant, model, requests, prompt_tokens, cached_tokens, output_tokens, reasoning_tokens, price_micro,
        0 AS gpu_us, 0 AS gpu_cost_micro FROM usage_hour
    UNION ALL SELECT hour, tenant, model, 0, 0, 0, 0, 0, 0, gpu_us, gpu_cost_micro FROM cost_hour
) AS bills WHERE $hours AND $tenant AND ({model:String} = '' OR model = {model:String})
GROUP BY bucket_us, name_1, name_2 HAVING $after_group
ORDER BY bucket_us, name_1, name_2 LIMIT {top:Int64};

-- name: complete_until
-- tells: moment before which every delivered event is inserted; 0: no consumer has reported yet
SELECT toUnixTimestamp64Micro(min(complete)) AS until_us FROM (
    SELECT argMax(complete_until, written_at) AS complete FROM ingest_progress GROUP BY topic, partition
    HAVING max(ingest_progress.written_at) > (SELECT max(written_at) FROM ingest_progress) - toIntervalDay(1)
);

-- name: billed_tenants
-- tells: tokens and price billed to each tenant in a window of whole hours, each bill once, of streams that began in it
-- default: after = ''
-- default: top = 1500
SELECT tenant, sum(bills.requests) AS requests, sum(bills.prompt_tokens + bills.output_tokens) AS tokens,
    sum(bills.price_micro) AS price_micro
FROM bills FINAL WHERE $hours AND $tenant AND bills.tenant > {after:String}
    AND (adjusts OR reinterpretAsUInt64(reverse(unhex(substring(id, 6, 12)))) * 1000 >= {from_us:Int64})
GROUP BY tenant ORDER BY tenant LIMIT {top:Int64};

-- name: bills_by_hour
-- tells: bills of each hour and model of a tenant, each once, and of those the rows that adjust the hour
-- default: after_us = -1
-- default: after_1 = ''
-- default: after_2 = ''
-- default: top = 10000
SELECT toUnixTimestamp(hour) * 1000000 AS hour_us, tenant, model, sum(bills.requests) AS requests,
    sum(bills.prompt_tokens) AS prompt_tokens, sum(bills.cached_tokens) AS cached_tokens,
    sum(bills.output_tokens) AS output_tokens, sum(bills.reasoning_tokens) AS reasoning_tokens,
    sum(bills.price_micro) AS price_micro, countIf(adjusts) AS adjusting, $adjusted_sums
FROM bills FINAL WHERE $hours AND $tenant
GROUP BY hour, tenant, model HAVING $after_hour ORDER BY hour, tenant, model LIMIT {top:Int64};
