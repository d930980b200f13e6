-- Publish records of tenants and plans. KEYS: records by name, revisions by name. 
-- ARGV: least revision that must be published already; name, revision and record of each.
-- A record with an older or equal revision is skipped. Returns 1, or 0 when Redis has lost that revision.
local newest = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
if tonumber(newest or 0) < tonumber(ARGV[1]) then return 0 end
for i = 2, #ARGV, 3 do
  local held = redis.call('ZSCORE', KEYS[2], ARGV[i])
  if not held or tonumber(held) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
    redis.call('ZADD', KEYS[2], ARGV[i + 1], ARGV[i])
  end
end
return 1
