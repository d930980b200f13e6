-- Delete the content of an ended stream at the wish of its tenant.
-- KEYS: meta, log, inputs, placement records. ARGV: tenant.
-- Returns 1 deleted, 0 not: the tenant has no such stream, or it has not ended.
local m = KEYS[1]
local v = redis.call('HMGET', m, 'e', 'st', 't', 'fg')
if not v[1] or v[3] ~= ARGV[1] or v[2] == 'live' or v[4] then return 0 end
delete_content(m, KEYS[2], KEYS[3], KEYS[4])
return 1
