-- Delete the content of a stream that a gateway has read to its end, if its plan keeps nothing.
-- KEYS: meta, log, inputs, placement records. ARGV: gateway.
-- Returns 1 deleted, 0 not: it has not ended, is kept, or another gateway still reads it.
local m = KEYS[1]
local v = redis.call('HMGET', m, 'e', 'st', 'rt', 'w')
if not v[1] or v[2] == 'live' or v[3] ~= '0' then return 0 end
local others = without(v[4], ARGV[1])
if others ~= v[4] then redis.call('HSET', m, 'w', others) end
if others ~= '' then return 0 end
delete_content(m, KEYS[2], KEYS[3], KEYS[4])
return 1
