-- An idempotency key. KEYS: the key. ARGV: value, ttl ms. Returns the value it holds now: ours when we were first.
-- Each call renews the key: the one that finds it may create its stream, or read that stream for long.
local held = redis.call('GET', KEYS[1])
if held then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return held
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
