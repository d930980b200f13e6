-- Take responses whose time has come; each is looked at again later, should the caller die. KEYS: a queue.
-- ARGV: responses at most, ms to the next look at those that wait for the database, ms that a response lives while its
--   stream runs, least and most ms to the next look at those.
-- Returns of each: response, tenant, ms since it was begun, 1 if it was deleted.
local out, now = {}, now_ms()
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])) do
  local r = R .. 'r:' .. id
  local v = redis.call('HMGET', r, 't', 'at', 'kp', 'dl', 'c', 'g')
  if not v[1] then
    redis.call('ZREM', KEYS[1], id)
  else
    local age, next_ms = math.max(0, now - v[2]), ARGV[2]
    if KEYS[1] == LIVE then
      -- Often enough that the log of a stream that has ended is still kept
      next_ms = math.max(tonumber(ARGV[4]), math.min(age / 4, tonumber(ARGV[5]), v[3] / 3))
      redis.call('PEXPIRE', r, ARGV[3])
      redis.call('ZADD', R .. 'x:' .. v[6], 'XX', whole(now + ARGV[3]), id)
      keep(R .. 'x:' .. v[6], tonumber(ARGV[3]))
      keep(R .. 'b:' .. v[6], tonumber(ARGV[3]))
      if v[5] then redis.call('PEXPIRE', R .. 'c:' .. v[5], ARGV[3]) end
    end
    look_at(KEYS[1], id, now + next_ms, tonumber(ARGV[3]))
    for _, field in ipairs({id, v[1], whole(age), v[4] and 1 or 0}) do out[#out + 1] = field end
  end
end
return out
