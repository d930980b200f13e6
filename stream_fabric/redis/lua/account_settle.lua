-- Count what ended streams used instead of what they reserved, each once. KEYS: the prefix's 'held'.
-- ARGV: of each stream: id, tokens, requests (0: it was withdrawn), cached prompt tokens, output tokens. Returns the
--   number of reservations it settled.
local now, settled = now_ms(), 0
for a = 1, #ARGV, 5 do
  local record = redis.call('HGET', KEYS[1], ARGV[a])
  if record then
    settled = settled + 1
    redis.call('HDEL', KEYS[1], ARGV[a])
    redis.call('ZREM', A .. 'due', ARGV[a])
    local parts, grant, at = held_parts(record)
    local reserved, rates = tonumber(parts[1]), {}
    for _, part_ in ipairs(parts) do
      if string.sub(part_, 1, 1) == '%' then
        for r, t in string.gmatch(part_, '(%d*),(%d*);') do rates[#rates + 1] = {r = tonumber(r), t = tonumber(t)} end
      end
    end
    for i, part_ in ipairs(parts) do
      if i == at then
        settle_grant(grant, tonumber(ARGV[a + 1]), tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4]))
      elseif i > 1 and string.sub(part_, 1, 1) ~= '%' then
        local key = A .. 'b:' .. part_
        local v = redis.call('HMGET', key, 'r', 'ra', 'rl', 't', 'ta', 'tl')
        local rate = rates[i - 1] or {} -- a reservation of the release before has none
        local rl, tl = tonumber(v[3] or rate.r), tonumber(v[6] or rate.t)
        local r = rl and math.max(0, drained(v[1], v[2], rl, now) + (ARGV[a + 2] - 1))
        local t = tl and math.max(0, drained(v[4], v[5], tl, now) + (ARGV[a + 1] - reserved))
        write_buckets(key, now, r, rl or 0, t, tl or 0)
        redis.call('SREM', A .. 'c:' .. part_, ARGV[a])
      end
    end
  end
end
return settled
