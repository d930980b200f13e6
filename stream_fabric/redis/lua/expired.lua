-- KEYS: leases. Returns the replicas whose lease ran out, or was given before the clock went back: a living replica
-- renews it soon, and a dead one would keep it for as long as the clock went back.
local now = now_ms()
local names = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. now)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now + LEASE_MS_MAX, '+inf')) do
  names[#names + 1] = name
end
return names
