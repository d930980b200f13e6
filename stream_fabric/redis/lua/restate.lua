-- Another model answers a stream that no producer has begun. KEYS: meta. ARGV: tenant, facts, model.
local v = redis.call('HMGET', KEYS[1], 't', 'st', 's')
if v[1] == ARGV[1] and v[2] == 'live' and v[3] == '0' then
  redis.call('HSET', KEYS[1], 'f', ARGV[2], 'mo', ARGV[3])
  return 1
end
return 0
