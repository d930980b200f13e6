-- Add an input to what a running stream has reserved, or refuse it. KEYS: the prefix's 'held'.
-- ARGV: stream, requests (-1: give an input back), tokens (below 0: give them back), number of subjects, name of this
--   call (one that is repeated changes nothing); then of each subject: name, requests per minute, tokens per minute
--   ('' no limit). Those that the stream does not count against do not count here either.
-- Returns as account_admit.lua up to the uses: {code, subject, kind, retry ms, '', 0, '', uses …}.
local id, requests, tokens, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now, calls = now_ms(), A .. 'o:' .. id
local is_repeat = redis.call('SISMEMBER', calls, ARGV[5]) == 1
local record = redis.call('HGET', KEYS[1], id)
local parts = record and held_parts(record) or {}
local counts = {}
for i = 2, #parts do counts[parts[i]] = true end
local uses, worst, worst_i, worst_kind = {}, nil, 0, ''
for i = 1, count do
  local a = 6 + (i - 1) * 3
  local use = {name = ARGV[a], rl = tonumber(ARGV[a + 1]), tl = tonumber(ARGV[a + 2])}
  local v = redis.call('HMGET', A .. 'b:' .. use.name, 'r', 'ra', 't', 'ta')
  use.r = use.rl and drained(v[1], v[2], use.rl, now) or 0
  use.t = use.tl and drained(v[3], v[4], use.tl, now) or 0
  uses[i] = use
  for _, each in ipairs(counts[use.name] and not is_repeat and {{'r', requests}, {'t', tokens}} or {}) do
    local limit, wait = use[each[1] .. 'l'], nil
    local over = limit and use[each[1]] + each[2] - limit
    if over and over > 0 and each[2] > 0 then wait = each[2] > limit and -1 or over / limit * MINUTE_MS end
    if wait and (not worst or (wait < 0 and math.huge or wait) > (worst < 0 and math.huge or worst)) then
      worst, worst_i, worst_kind = wait, i - 1, each[1]
    end
  end
end
if record and not worst and not is_repeat then
  parts[1] = string.format('%d', tonumber(parts[1]) + tokens)
  for _, use in ipairs(uses) do
    if counts[use.name] then
      use.r = use.rl and math.max(0, use.r + requests) or 0
      use.t = use.tl and math.max(0, use.t + tokens) or 0
      write_buckets(A .. 'b:' .. use.name, now, use.rl and use.r, use.rl or 0, use.tl and use.t, use.tl or 0)
    end
  end
  redis.call('HSET', KEYS[1], id, table.concat(parts, UNIT))
  redis.call('SADD', calls, ARGV[5])
  redis.call('PEXPIRE', calls, MINUTE_MS) -- longer than any command is retried
end
local out = {worst and 1 or 0, worst_i, worst_kind, number(worst or 0), '', 0, ''}
for _, use in ipairs(uses) do
  local at = #out
  out[at + 1], out[at + 2], out[at + 3] = number(use.r), number(use.t), 0
end
return out
