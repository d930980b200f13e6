-- Note that the database has a response, or has deleted it. KEYS: the response. ARGV: response.
-- Returns 1, or 0: it was deleted meanwhile, so the caller deletes it from the database.
local id, now = ARGV[1], now_ms()
local v = redis.call('HMGET', KEYS[1], 'g', 'dl', 'kp', 'ca', 'n', 'c')
redis.call('ZREM', UNSAVED, id)
if not v[1] then return 1 end
if v[2] then return 0 end
local ms = math.max(1000, v[3] - (now - (v[4] or now)))
redis.call('HSET', KEYS[1], 'sv', '1')
redis.call('PEXPIRE', KEYS[1], whole(ms))
hold(v[1], id, v[5], now, ms)
unlock(v[6], id)
return 1
