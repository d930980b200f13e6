-- Grant a running stream more output tokens. KEYS: the prefix's 'held'.
-- ARGV: stream, output tokens it wants in total, tokens of its prompt (0: as reserved).
-- Returns {granted in total, …}: then each budget that has crossed a mark for the first time, and the mark.
--   {-1}: the account knows no reservation of the stream, because Redis has lost it.
local id = ARGV[1]
local record = redis.call('HGET', KEYS[1], id)
local parts, old, at = held_parts(record or '')
if not old then return {-1} end
local prompt, crossed = tonumber(ARGV[3]), {}
if prompt == 0 then prompt = old.prompt end
read_counters(old.claims)
local fits, binding = math.max(tonumber(ARGV[2]), old.output), nil
local held_m = price(old.prices, old.prompt, 0, old.output)
for _, c in ipairs(old.claims) do
  local found
  if c.use.exists then
    found = fitting(c, prompt, fits, old.prices, old.prompt + old.output, held_m)
  else
    found = fitting(c, prompt, fits, old.prices, 0, 0)
  end
  if found < fits then fits, binding = found, c end
end
local exceeded, now = {}, now_ms()
if binding then
  cross(binding, 'exceeded', exceeded)
  if #exceeded > 0 then
    binding.use.exists = true
    write_counter(binding)
    keep_counter(binding, now)
  end
end
if fits < 0 then return {0, unpack(exceeded)} end
local new = {prompt = prompt, output = fits, prices = old.prices, claims = old.claims}
parts[at] = grant_text(new)
redis.call('HSET', KEYS[1], id, table.concat(parts, UNIT))
change_grant(old, new, crossed)
for _, each in ipairs(exceeded) do crossed[#crossed + 1] = each end
return {fits, unpack(crossed)}
