-- Heads of many streams of one slot, for watchdogs. KEYS: metas. ARGV: gateway ('' of an agent).
-- Returns of each {epoch, last, status, cancelled at, unwatched, ms since, watched by the gateway, replica,
--   inputs}, or {}.
local now, replies = now_ms(), {}
for i, m in ipairs(KEYS) do
  local v = redis.call('HMGET', m, 'e', 's', 'st', 'cx', 'uw', 'w', 'r', 'in')
  if not v[1] then
    replies[i] = {}
  else
    local since = tonumber(string.match(v[5], '%d+'))
    local watched = 0
    if string.find(' ' .. v[6], ' ' .. ARGV[1] .. ' ', 1, true) then watched = 1 end
    replies[i] = {v[1], tonumber(v[2]), v[3], tonumber(v[4] or -1), string.sub(v[5], 1, 1),
      since and now - since or 0, watched, v[7], tonumber(v[8] or 0)}
  end
end
return replies
