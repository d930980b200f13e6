-- Register a gateway and read the log after a position, with no moment between: later appends are published to it.
-- KEYS: meta, log. ARGV: tenant ('' any), gateway ('' only read), after as "epoch-seq", entries at most.
-- Who has neither tenant nor gateway bills the stream: it finds one whose content is deleted, too.
-- Returns {} when there is no such stream for the tenant, or its plan's time is over, else
--   {epoch, last, status, facts, bases, structure, tenant, for how many ms nobody had watched it, entries}.
local m = KEYS[1]
local v = redis.call('HMGET', m, 'e', 's', 'st', 'f', 'b', 'o', 't', 'w', 'uw', 'fg', 'rt')
local bills = ARGV[1] == '' and ARGV[2] == ''
if not v[1] or (v[10] and not bills) or (ARGV[1] ~= '' and v[7] ~= ARGV[1]) then return {} end
if v[11] and v[3] ~= 'live' and not bills and redis.call('EXISTS', KEYS[2]) == 0 then
  return {} -- its meta is kept longer
end
local is_kept = v[3] ~= 'live' and v[11] ~= '0' -- else it is deleted once its watchers have read it
if ARGV[2] ~= '' and not is_kept and not string.find(' ' .. v[8], ' ' .. ARGV[2] .. ' ', 1, true) then
  redis.call('HSET', m, 'w', v[8] .. ARGV[2] .. ' ', 'uw', '')
elseif ARGV[2] ~= '' and v[9] ~= '' then
  redis.call('HSET', m, 'uw', '')
end
local since = v[9] and string.match(v[9], '^%a(%d+)')
return {v[1], tonumber(v[2]), v[3], v[4], v[5], v[6], v[7], since and math.max(now_ms() - since, 0) or 0,
  redis.call('XRANGE', KEYS[2], '(' .. ARGV[3], '+', 'COUNT', ARGV[4])}
