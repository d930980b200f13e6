-- Keep a record beside a stream, once. KEYS: records. ARGV: record, ttl ms, records at most.
for _, held in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  if held == ARGV[1] then return 0 end
end
redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], -ARGV[3], -1)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
