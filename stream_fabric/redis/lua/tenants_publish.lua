-- Publish records of tenants and plans. KEYS: records by name, revisions by name. ARGV: name, revision, record of each.
-- A record with an older or equal revision is skipped.
for i = 1, #ARGV, 3 do
  local held = redis.call('ZSCORE', KEYS[2], ARGV[i])
  if not held or tonumber(held) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
    redis.call('ZADD', KEYS[2], ARGV[i + 1], ARGV[i])
  end
end
return 1
