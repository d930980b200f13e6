-- An idempotency key. KEYS: the key. ARGV: value, ttl ms. Returns the value it holds now: ours when we were first.
local held = redis.call('GET', KEYS[1])
if held then return held end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
