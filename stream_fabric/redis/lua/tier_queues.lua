-- How long a pool's lines are. KEYS: the pool's prefix. ARGV: how many of each are looked at.
-- Returns of each tier: how many wait; for how long the oldest of those looked at, in us; and the prompt and output tokens
--   that all ask for, as those looked at tell of them.
local now = now_us()
local out = {}
for tier = 0, TIERS - 1 do
  local count = redis.call('ZCARD', P .. 'q' .. tier)
  local oldest, prompt, output = now, 0, 0
  local line = redis.call('ZRANGE', P .. 'q' .. tier, 0, ARGV[1] - 1)
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
