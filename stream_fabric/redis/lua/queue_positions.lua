-- Where streams stand in line. KEYS: the pool's prefix. ARGV: streams. Returns how many wait, then each one's position.
local out = {waiting_count()}
for i, id in ipairs(ARGV) do out[i + 1] = position(id) end
return out
