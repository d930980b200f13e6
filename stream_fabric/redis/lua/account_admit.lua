-- Admit a request to its tenant's limits, or refuse it. KEYS: the prefix's 'held'.
-- ARGV: stream ('' only read the uses), tokens it will use about, number of subjects; then of each subject: name,
--   requests per minute, tokens per minute, streams ('' no limit); then, of a request with budgets: tokens of the
--   prompt, output tokens to reserve, three prices, and of each claim: name, tokens, micro ('' no limit), expiry, 1 if
--   it warns.
-- Returns {code, subject, kind, retry ms, overdue streams, granted, crossed, …}: 0 admitted, 1 exceeded: index of the
--   subject from 0, kind r, t or s, wait as in Exceeded.retry_ms, 2 over budget: index of the claim, kind t or m;
--   crossed: each budget that has crossed a mark, and the mark; then of each subject: spent requests, spent tokens,
--   running streams; then of each claim: its counter's t, m, rt, rm, f.
local id, tokens, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()
local names, limits, spent, crossed = {}, {}, {}, {}
local grant = ARGV[4 + count * 4] and grant_of(ARGV, 4 + count * 4)
for i = 1, count do
  local a = 4 + (i - 1) * 4
  names[i] = ARGV[a]
  limits[i] = {r = tonumber(ARGV[a + 1]), t = tonumber(ARGV[a + 2]), s = tonumber(ARGV[a + 3])}
  local v, of = redis.call('HMGET', A .. 'b:' .. names[i], 'r', 'ra', 't', 'ta'), {r = 0, t = 0, s = 0}
  if limits[i].r then of.r = drained(v[1], v[2], limits[i].r, now) end
  if limits[i].t then of.t = drained(v[3], v[4], limits[i].t, now) end
  if limits[i].s then of.s = redis.call('SCARD', A .. 'c:' .. names[i]) end
  spent[i] = of
  if id ~= '' and math.max(v[2] or 0, v[4] or 0) > now then -- the clock has gone back: the buckets drain from now on
    redis.call('HSET', A .. 'b:' .. names[i], 'ra', math.min(v[2] or now, now), 'ta', math.min(v[4] or now, now))
  end
end

local function reply(code, subject, kind, retry, overdue)
  local granted = grant and grant.output or 0
  local out = {code, subject, kind, number(retry), table.concat(overdue, ' '), granted, table.concat(crossed, ' ')}
  for i = 1, count do
    out[#out + 1], out[#out + 2], out[#out + 3] = number(spent[i].r), number(spent[i].t), spent[i].s
  end
  for _, c in ipairs(grant and grant.claims or {}) do
    for _, field in ipairs({'t', 'm', 'rt', 'rm', 'f'}) do out[#out + 1] = c.use[field] end
  end
  return out
end

if id == '' then return reply(0, 0, '', 0, {}) end
local overdue = redis.call('ZRANGEBYSCORE', A .. 'due', '-inf', now, 'LIMIT', 0, CHECKED_MAX)
for _, stream in ipairs(overdue) do
  redis.call('ZADD', A .. 'due', now + CHECK_MS, stream)
  -- A subject may have no other request for as long as its stream runs
  local parts = held_parts(redis.call('HGET', KEYS[1], stream) or '')
  for i = 2, #parts do redis.call('PEXPIRE', A .. 'c:' .. parts[i], KEPT_MS) end
end
if grant then read_counters(grant.claims) end
local record = redis.call('HGET', KEYS[1], id)
if record then
  if grant then
    local _, held = held_parts(record)
    grant.output = held and held.output or 0
  end
  return reply(0, 0, '', 0, overdue)
end

if grant then
  local least = math.min(grant.output, OUTPUT_MIN)
  local wanted = grant.output
  for i, c in ipairs(grant.claims) do
    local fits, unit = fitting(c, grant.prompt, wanted, grant.prices, 0, 0)
    if fits < least then
      grant.output = 0
      cross(c, 'exceeded', crossed)
      if #crossed > 0 then
        write_counter(c)
        keep_counter(c, now)
      end
      return reply(2, i - 1, unit, 0, overdue)
    end
    wanted = fits
  end
  grant.fits = wanted
end

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
if worst then
  if grant then grant.output = 0 end
  return reply(1, worst_i - 1, worst_kind, worst, overdue)
end

local held, rates = {ARGV[2]}, {}
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
  rates[i] = ARGV[5 + (i - 1) * 4] .. ',' .. ARGV[6 + (i - 1) * 4] .. ';'
end
held[#held + 1] = '%' .. table.concat(rates)
local kept = KEPT_MS
if grant then
  grant.output = grant.fits
  for _, c in ipairs(grant.claims) do c.use.exists = true end
  change_grant(nil, grant, crossed)
  for _, c in ipairs(grant.claims) do
    if c.name ~= REQUEST then
      keep_counter(c, now)
      kept = math.max(kept, c.expires > 0 and c.expires - now or BUDGET_IDLE_MS)
    end
  end
  held[#held + 1] = grant_text(grant)
end
redis.call('HSET', KEYS[1], id, table.concat(held, UNIT))
redis.call('ZADD', A .. 'due', now + CHECK_MS, id)
-- As long as a counter that its streams have reserved in
keep(KEYS[1], kept)
keep(A .. 'due', kept)
return reply(0, 0, '', 0, overdue)
