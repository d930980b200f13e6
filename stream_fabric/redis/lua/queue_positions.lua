-- Positions in the queue. KEYS: the pool's prefix. ARGV: streams. Returns the queue's length, then each position (0:
-- none).
local out = {waiting_count()}
for i, id in ipairs(ARGV) do out[i + 1] = position(id) end
return out
