-- Forget a replica, unless its lease is alive again or it still has streams in flight.
-- KEYS: the pool's prefix. ARGV: replica, 1 when the agent itself leaves. Returns 1 when it is forgotten.
local key = P .. ARGV[1] .. ':'
local expiry = redis.call('ZSCORE', P .. 'leases', ARGV[1])
local left_ms = (expiry or 0) - now_ms()
if ARGV[2] ~= '1' and left_ms > 0 and left_ms <= LEASE_MS_MAX then return 0 end -- more: as in ``expired.lua``
for _, id in ipairs(redis.call('HKEYS', key .. 'flight')) do
  if redis.call('HGET', P .. 'at', id) == ARGV[1] then return 0 end
end
redis.call('ZREM', P .. 'leases', ARGV[1])
redis.call('ZREM', P .. 'changes', ARGV[1])
for _, old in ipairs(redis.call('ZRANGEBYSCORE', P .. 'gone', '-inf',
    string.format('%d', now_us() - GONE_KEPT_MS * 1000))) do
  redis.call('ZREM', P .. 'gone', old)
end
redis.call('ZADD', P .. 'gone', string.format('%d', now_us()), ARGV[1])
redis.call('PEXPIRE', P .. 'gone', GONE_KEPT_MS)
for _, name in ipairs({'board', 'models', 'desired', 'asker', 'generations'}) do redis.call('HDEL', P .. name, ARGV[1]) end
redis.call('DEL', key .. 'info', key .. 'flight', key .. 'inbox', key .. 'unread', key .. 'prefix')
return 1
