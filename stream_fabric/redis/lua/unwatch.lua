-- A gateway's last local reader left. KEYS: meta. ARGV: gateway.
local m = KEYS[1]
local v = redis.call('HMGET', m, 'e', 'st', 'w')
if not v[1] then return 0 end
local left = without(v[3], ARGV[1])
redis.call('HSET', m, 'w', left)
if left == '' and v[2] == 'live' then redis.call('HSET', m, 'uw', 'L' .. now_ms()) end
return 1
