-- Take streams out of the queue: they were cancelled, or waited too long. KEYS: the pool's prefix. ARGV: streams.
-- Returns how many were queued.
local count = 0
for _, id in ipairs(ARGV) do
  local line = redis.call('HGET', P .. 'ask', id)
  local ask = line and asked(line)
  for tier = 0, ask and TIERS - 1 or -1 do
    if redis.call('ZSCORE', P .. 'q' .. tier .. ask.regions, id) then
      forget(id, tier, ask)
      drop_work({id})
      count = count + 1
    end
  end
end
return count
