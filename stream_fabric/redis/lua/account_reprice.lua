-- Charge a stream at other prices, none of them higher. KEYS: the prefix's 'held'. ARGV: stream, three prices.
-- Returns 1; 0: the stream has no budgets, or was settled.
local parts, old, at = held_parts(redis.call('HGET', KEYS[1], ARGV[1]) or '')
if not old then return 0 end
local new = {prompt = old.prompt, output = old.output, claims = old.claims,
  prices = {tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])}}
parts[at] = grant_text(new)
redis.call('HSET', KEYS[1], ARGV[1], table.concat(parts, UNIT))
read_counters(old.claims)
change_grant(old, new, {})
return 1
