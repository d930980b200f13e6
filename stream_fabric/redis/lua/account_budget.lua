-- Budgets, after ``account.lua``; ``accounts.budgets.BudgetState`` is the same algorithm.
-- Further keys: 'q:<budget>' hash of its counter: t and m tokens and micro-units that ended streams used, rt and rm
--   those reserved, f bits of what was told. A stream with budgets has one part more in its record in 'held', which
--   begins with '$': prompt, output, three prices, and five fields of each claim, each followed by \30.
local BITS = {warning = 1, exceeded = 2}

-- Let a key live so long at least, in ms.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, string.format('%d', ms)) end
end

-- Price in micro-units, rounded half up. ``math.fmod`` is exact where a division is not.
local function price(of, prompt, cached, output)
  cached = math.min(cached, prompt)
  local sum = (prompt - cached) * of[1] + cached * of[2] + output * of[3] + 1000000 / 2
  return (sum - math.fmod(sum, 1000000)) / 1000000
end

-- Fields of a claim as in ARGV: name, tokens, micro, expiry, 1 if it warns.
local function claim_of(fields, i)
  return {name = fields[i], t = tonumber(fields[i + 1]), m = tonumber(fields[i + 2]),
    expires = tonumber(fields[i + 3]), warns = fields[i + 4] == '1'}
end

-- Parse (fields, first): prompt, output, three prices, claims. The same in ARGV and in a record.
local function grant_of(fields, i)
  local g = {prompt = tonumber(fields[i]), output = tonumber(fields[i + 1]), claims = {}}
  g.prices = {tonumber(fields[i + 2]), tonumber(fields[i + 3]), tonumber(fields[i + 4])}
  for a = i + 5, #fields, 5 do g.claims[#g.claims + 1] = claim_of(fields, a) end
  return g
end

local function grant_text(g)
  local fields = {string.format('%d', g.prompt), string.format('%d', g.output),
    string.format('%d', g.prices[1]), string.format('%d', g.prices[2]), string.format('%d', g.prices[3])}
  for _, c in ipairs(g.claims) do
    for _, field in ipairs({c.name, c.t and string.format('%d', c.t) or '', c.m and string.format('%d', c.m) or '',
      string.format('%d', c.expires), c.warns and '1' or '0'}) do fields[#fields + 1] = field end
  end
  return '$' .. table.concat(fields, RECORD) .. RECORD
end

-- Parse the record of a stream in 'held': its parts, and its grant with the index of its part, if it has budgets.
local function held_parts(record)
  local parts, grant, at = {}, nil, nil
  for part_ in string.gmatch(record, '[^' .. UNIT .. ']+') do
    parts[#parts + 1] = part_
    if string.sub(part_, 1, 1) == '$' then
      local fields = {}
      for field in string.gmatch(string.sub(part_, 2), '([^' .. RECORD .. ']*)' .. RECORD) do
        fields[#fields + 1] = field
      end
      grant, at = grant_of(fields, 1), #parts
    end
  end
  return parts, grant, at
end

-- Read the counter of each claim into it: c.use, with c.use.exists; the request's own has none.
local function read_counters(claims)
  for _, c in ipairs(claims) do
    c.use = {t = 0, m = 0, rt = 0, rm = 0, f = 0, exists = false}
    if c.name ~= REQUEST then
      local v = redis.call('HMGET', A .. 'q:' .. c.name, 't', 'm', 'rt', 'rm', 'f')
      if v[1] then
        c.use = {t = tonumber(v[1]), m = tonumber(v[2]), rt = tonumber(v[3]), rm = tonumber(v[4]), f = tonumber(v[5]),
          exists = true}
      end
    end
  end
end

local function write_counter(c)
  local u = c.use
  redis.call('HSET', A .. 'q:' .. c.name, 't', string.format('%d', u.t), 'm', string.format('%d', u.m),
    'rt', string.format('%d', u.rt), 'rm', string.format('%d', u.rm), 'f', u.f)
end

local function keep_counter(c, now)
  keep(A .. 'q:' .. c.name, c.expires > 0 and math.max(c.expires - now, 1) or BUDGET_IDLE_MS)
end

-- How many of the wanted output tokens the budget has room for beside the prompt (below 0: not for the prompt), and
-- what limits them, t or m. ``t``, ``m``: what of its counter does not count.
local function fitting(c, prompt, wanted, prices, t, m)
  local fits, unit, u = wanted, 't', c.use
  if c.t then fits = math.min(fits, c.t - u.t - u.rt + t - prompt) end
  if c.m and fits >= 0 then
    local room = c.m - u.m - u.rm + m
    if price(prices, prompt, 0, fits) > room then
      local left = (room + 1) * 1000000 - 1000000 / 2 - 1 - prompt * prices[1]
      fits, unit = -1, 'm'
      if prices[3] > 0 and left >= 0 then fits = (left - math.fmod(left, prices[3])) / prices[3] end
    end
  end
  return math.max(fits, -1), unit
end

local function nearly_used(c)
  return c.t and (c.use.t + c.use.rt) * 5 >= c.t * WARN_FIFTHS or c.m and (c.use.m + c.use.rm) * 5 >= c.m * WARN_FIFTHS
end

-- Note that a budget has crossed a mark. Adds its name and the mark to ``crossed`` if it does so for the first time.
local function cross(c, what, crossed)
  local bit_ = BITS[what]
  if c.warns and math.floor(c.use.f / bit_) % 2 == 0 then
    c.use.f = c.use.f + bit_
    crossed[#crossed + 1], crossed[#crossed + 2] = c.name, what
  end
end

-- Replace a stream's reservation in its counters (nil: it had none) by another one, and warn.
local function change_grant(old, new, crossed)
  local tokens, micro = new.prompt + new.output, price(new.prices, new.prompt, 0, new.output)
  if old then
    tokens, micro = tokens - old.prompt - old.output, micro - price(old.prices, old.prompt, 0, old.output)
  end
  for _, c in ipairs(new.claims) do
    if c.name ~= REQUEST and c.use.exists then
      c.use.rt, c.use.rm = math.max(0, c.use.rt + tokens), math.max(0, c.use.rm + micro)
      if nearly_used(c) then cross(c, 'warning', crossed) end
      write_counter(c)
    end
  end
end

-- How much of a stream's use its budget counts: all that it reserved, and more as far as there is room.
local function counted(used, held, limit, total)
  if used <= held or not limit then return used end
  return held + math.min(used - held, math.max(0, limit - total))
end

local function settle_grant(g, tokens, cached, output)
  local micro = price(g.prices, tokens - output, cached, output)
  local held_t, held_m = g.prompt + g.output, price(g.prices, g.prompt, 0, g.output)
  read_counters(g.claims)
  for _, c in ipairs(g.claims) do
    local u = c.use
    if u.exists then
      u.t = u.t + counted(tokens, held_t, c.t, u.t + u.rt)
      u.m = u.m + counted(micro, held_m, c.m, u.m + u.rm)
      u.rt, u.rm = math.max(0, u.rt - held_t), math.max(0, u.rm - held_m)
      write_counter(c)
    end
  end
end
