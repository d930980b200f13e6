-- KEYS: meta, log. ARGV: epoch, tenant, facts, gateway ('' none), live ttl ms, model, 1 if its tenant's account holds
--   a reservation for it, ms that it is kept after its end (0 until it was read; '' as the platform is set).
-- Returns {code, last}: 0 created, 1 exists with the same epoch and tenant, 2 exists otherwise, 3 cancelled before.
local m = KEYS[1]
local v = redis.call('HMGET', m, 'e', 't', 's', 'cx')
if v[1] then
  if v[1] == ARGV[1] and v[2] == ARGV[2] then return {1, tonumber(v[3])} end
  return {2, 0}
end
if v[4] and v[2] == ARGV[2] then return {3, 0} end
local now = now_ms()
local watchers, unwatched = '', 'L' .. now
if ARGV[4] ~= '' then watchers, unwatched = ARGV[4] .. ' ', '' end
if redis.call('EXISTS', m, KEYS[2]) > 0 then -- eviction may have left either
  redis.call('HSET', m, 'st', '') -- refused at the memory limit, which a script whose first write deletes is not
  redis.call('DEL', m, KEYS[2])
end
redis.call('HSET', m, 'e', ARGV[1], 's', '0', 'st', 'live', 't', ARGV[2], 'f', ARGV[3], 'w', watchers,
  'uw', unwatched, 'x', now, 'r', '', 'us', '', 'b', '', 'o', '', 'mo', ARGV[6])
if ARGV[7] == '1' then redis.call('HSET', m, 'ac', '1') end
if ARGV[8] ~= '' then redis.call('HSET', m, 'rt', ARGV[8]) end
redis.call('PEXPIRE', m, ARGV[5])
return {0, 0}
