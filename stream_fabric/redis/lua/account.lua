-- Prefix of the scripts of a tenant's account; ``accounts.account.AccountState`` is the same algorithm.
-- KEYS[1]: prefix .. 'held', a hash: stream → tokens it reserved and its subjects, each after \31; then '%' and of each
--   subject 'requests,tokens;' per minute, because its bucket expires when it is full again.
-- Other keys: 'due' sorted set of streams by when they are checked next, ms; 'b:<subject>' hash of its buckets: r spent
--   requests, ra when, rl limit per minute, and t, ta, tl for tokens; 'c:<subject>' set of its running streams;
--   'o:<stream>' set of the last calls that added to its reservation.
local A = string.sub(KEYS[1], 1, -5)

-- After a failover to a host whose clock is behind, at lies in the future: the bucket keeps its amount.
local function drained(spent, at, limit, now)
  return math.max(0, (tonumber(spent) or 0) - limit * math.max(now - (tonumber(at) or now), 0) / MINUTE_MS)
end

local function number(value)
  return string.format('%.17g', value)
end

-- Write the buckets of a subject that have a limit (spent false: no such bucket). They expire when they are full again.
local function write_buckets(key, now, requests, requests_limit, tokens, tokens_limit)
  local fields, ms = {}, 1000
  if requests then
    fields = {'r', number(requests), 'ra', now, 'rl', requests_limit}
    if requests_limit > 0 then ms = math.max(ms, requests / requests_limit * MINUTE_MS) end
  end
  if tokens then
    for _, value in ipairs({'t', number(tokens), 'ta', now, 'tl', tokens_limit}) do fields[#fields + 1] = value end
    if tokens_limit > 0 then ms = math.max(ms, tokens / tokens_limit * MINUTE_MS) end
  end
  if #fields == 0 then return end
  redis.call('HSET', key, unpack(fields))
  redis.call('PEXPIRE', key, string.format('%d', ms + 1000))
end
