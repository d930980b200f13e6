-- A replica's lease. What is in flight is rebuilt from the agent's own list and what it has not read yet: nothing
-- counts up in one place and down in another.
-- KEYS: leases, info, in flight, inbox. ARGV: replica, ttl ms, state, slots, room, info JSON, running streams.
local now = now_ms()
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('HSET', KEYS[2], 'state', ARGV[3], 'slots', ARGV[4], 'room', ARGV[5], 'info', ARGV[6])
redis.call('DEL', KEYS[3])
for i = 7, #ARGV do redis.call('HSET', KEYS[3], ARGV[i], now) end
for _, entry in ipairs(redis.call('XRANGE', KEYS[4], '-', '+')) do
  redis.call('HSET', KEYS[3], entry[2][2], now)
end
-- A pool that nobody renews any more leaves nothing behind, once the reapers had their time
for i = 2, 4 do redis.call('PEXPIRE', KEYS[i], 3600000) end
return now
