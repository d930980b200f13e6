-- The queue of each tier. KEYS: the pool's prefix. ARGV: how many requests of each are sampled.
-- Returns for each tier: its length; the longest wait in the sample, in us; and the prompt and output tokens of all,
--   extrapolated from the sample, which is of the tier's longest lane.
local now = now_us()
local out = {}
local lanes = pinned_lanes() or {}
for tier = 0, TIERS - 1 do
  local count = redis.call('ZCARD', P .. 'q' .. tier)
  local sampled, longest = tier, count
  for _, lane in ipairs(lanes) do
    if lane.tier == tier then
      local more = redis.call('ZCARD', P .. 'q' .. lane.name)
      count = count + more
      if more > longest then sampled, longest = lane.name, more end
    end
  end
  local oldest, prompt, output = now, 0, 0
  local line = redis.call('ZRANGE', P .. 'q' .. sampled, 0, ARGV[1] - 1)
  for _, id in ipairs(line) do
    local ask = asked(redis.call('HGET', P .. 'ask', id))
    oldest = math.min(oldest, ask.since)
    prompt, output = prompt + ask.prompt, output + ask.output
  end
  local scale = #line > 0 and count / #line or 0
  for _, value in ipairs({count, now - oldest, math.floor(prompt * scale), math.floor(output * scale)}) do
    out[#out + 1] = value
  end
end
return out
