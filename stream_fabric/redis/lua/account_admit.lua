-- Admit a request to its tenant's limits, or refuse it. KEYS: the prefix's 'held'.
-- ARGV: stream ('' only read the uses), tokens it will use about; then of each subject: name, requests per minute,
--   tokens per minute, streams ('' no limit).
-- Returns {code, subject, kind, retry ms, overdue streams, …}: 0 admitted, 1 exceeded: index of the subject from 0,
--   kind r, t or s, wait as in Exceeded.retry_ms; then of each subject: spent requests, spent tokens, running streams.
local id, tokens = ARGV[1], tonumber(ARGV[2])
local now = now_ms()
local names, limits, spent, count = {}, {}, {}, (#ARGV - 2) / 4
for i = 1, count do
  local a = 3 + (i - 1) * 4
  names[i] = ARGV[a]
  limits[i] = {r = tonumber(ARGV[a + 1]), t = tonumber(ARGV[a + 2]), s = tonumber(ARGV[a + 3])}
  local v, of = redis.call('HMGET', A .. 'b:' .. names[i], 'r', 'ra', 't', 'ta'), {r = 0, t = 0, s = 0}
  if limits[i].r then of.r = drained(v[1], v[2], limits[i].r, now) end
  if limits[i].t then of.t = drained(v[3], v[4], limits[i].t, now) end
  if limits[i].s then of.s = redis.call('SCARD', A .. 'c:' .. names[i]) end
  spent[i] = of
end

local function reply(code, subject, kind, retry, overdue)
  local out = {code, subject, kind, number(retry), table.concat(overdue, ' ')}
  for i = 1, count do
    out[#out + 1], out[#out + 2], out[#out + 3] = number(spent[i].r), number(spent[i].t), spent[i].s
  end
  return out
end

if id == '' then return reply(0, 0, '', 0, {}) end
local overdue = redis.call('ZRANGEBYSCORE', A .. 'due', '-inf', now, 'LIMIT', 0, CHECKED_MAX)
for _, stream in ipairs(overdue) do redis.call('ZADD', A .. 'due', now + CHECK_MS, stream) end
if redis.call('HEXISTS', KEYS[1], id) == 1 then return reply(0, 0, '', 0, overdue) end

local worst, worst_i, worst_kind
local function compare(i, kind, wait)
  local rank = wait < 0 and math.huge or wait
  if not worst or rank > (worst < 0 and math.huge or worst) then worst, worst_i, worst_kind = wait, i, kind end
end
for i = 1, count do
  local l, of = limits[i], spent[i]
  for _, each in ipairs({{'r', 1}, {'t', tokens}}) do
    local limit, amount = l[each[1]], each[2]
    if limit then
      if amount > limit then
        compare(i, each[1], -1)
      elseif of[each[1]] + amount > limit then
        compare(i, each[1], (of[each[1]] + amount - limit) / limit * MINUTE_MS)
      end
    end
  end
  if l.s and of.s >= l.s then compare(i, 's', l.s == 0 and -1 or 0) end
end
if worst then return reply(1, worst_i - 1, worst_kind, worst, overdue) end

local held = {ARGV[2]}
for i = 1, count do
  local l, of, key = limits[i], spent[i], A .. 'b:' .. names[i]
  if l.r then of.r = of.r + 1 end
  if l.t then of.t = of.t + tokens end
  write_buckets(key, now, l.r and of.r, l.r or 0, l.t and of.t, l.t or 0)
  if l.s then
    of.s = of.s + redis.call('SADD', A .. 'c:' .. names[i], id)
    redis.call('PEXPIRE', A .. 'c:' .. names[i], KEPT_MS)
  end
  held[#held + 1] = names[i]
end
redis.call('HSET', KEYS[1], id, table.concat(held, UNIT))
redis.call('ZADD', A .. 'due', now + CHECK_MS, id)
redis.call('PEXPIRE', KEYS[1], KEPT_MS)
redis.call('PEXPIRE', A .. 'due', KEPT_MS)
return reply(0, 0, '', 0, overdue)
