-- Keep what came of a response, and let it wait for the database. KEYS: the response. ARGV: response, what came of it,
-- bytes.
-- Returns 1, or 0: there is no such response, or it was deleted.
local id, now = ARGV[1], now_ms()
local v = redis.call('HMGET', KEYS[1], 'g', 'dl', 'ca', 'kp', 'dm', 'n', 'c')
if not v[1] or v[2] then return 0 end
if v[3] then return 1 end
local bytes, ms, to_save = v[6] + ARGV[3], math.max(v[4], v[5]), v[5] ~= '0'
redis.call('HSET', KEYS[1], 'p', ARGV[2], 'n', whole(bytes), 'ca', whole(now))
redis.call('PEXPIRE', KEYS[1], whole(ms))
-- Without regard to the most bytes: what was generated is not lost
hold(v[1], id, bytes, now, ms)
redis.call('ZREM', LIVE, id)
if not to_save then
  unlock(v[7], id)
  return 1
end
if v[7] then redis.call('PEXPIRE', R .. 'c:' .. v[7], whole(ms)) end
look_at(UNSAVED, id, now, ms)
-- No gateway with a database removes those that have expired where there is none
for _, other in ipairs(redis.call('ZRANGE', UNSAVED, 0, 3)) do
  if redis.call('EXISTS', R .. 'r:' .. other) == 0 then redis.call('ZREM', UNSAVED, other) end
end
return 1
