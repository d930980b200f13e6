-- Take streams out of the queue: they were cancelled, or waited too long. KEYS: the pool's prefix. ARGV: streams.
-- Returns how many were queued.
local count = 0
for _, id in ipairs(ARGV) do
  for tier = 0, TIERS - 1 do
    if redis.call('ZSCORE', P .. 'q' .. tier, id) then
      forget(id, tier, asked(redis.call('HGET', P .. 'ask', id)))
      drop_work({id})
      count = count + 1
    end
  end
end
return count
