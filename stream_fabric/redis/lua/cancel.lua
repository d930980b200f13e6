-- The one place where a cancel happens: after it answers "accepted at s" no data frame above s exists.
-- KEYS: meta, log. ARGV: id, tenant, channel prefix, publish command, retention ms, pending ttl ms, only when
--   nobody has watched for this many ms ('' always).
-- Returns {result, epoch, at, status}, and the stream's usage if it has ended now and its tenant's account must settle
--   it.
local m, l, id, tenant = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local v = redis.call('HMGET', m, 'e', 't', 's', 'st', 'cx', 'w', 'r', 'us', 'uw', 'ac')
if not v[1] then
  if ARGV[7] ~= '' then return {'none', '', 0, ''} end
  if v[2] and v[2] ~= tenant then return {'none', '', 0, ''} end
  redis.call('HSET', m, 'cx', '0', 't', tenant)
  redis.call('PEXPIRE', m, ARGV[6])
  return {'pending', '', 0, ''}
end
if v[2] ~= tenant then return {'none', '', 0, ''} end
local last = tonumber(v[3])
if v[4] == 'cancelled' then return {'already', v[1], tonumber(v[5]), v[4]} end
if v[4] ~= 'live' then return {'terminal', v[1], last, v[4]} end
if ARGV[7] ~= '' then
  local since = tonumber(string.match(v[9], '%d+'))
  if not since or now_ms() - since < tonumber(ARGV[7]) then return {'watched', v[1], last, v[4]} end
end
redis.call('HSET', m, 'cx', v[3])
finish(m, l, id, v[1], last, '{"k":"end","status":"cancelled","usage":' .. usage_json(v[8]) .. '}', 'cancelled',
  v[6], ARGV[3], ARGV[4], ARGV[5], tenant, v[8])
if v[7] ~= '' then
  redis.call(ARGV[4], ARGV[3] .. v[7], 'cancel' .. UNIT .. id .. UNIT .. v[1] .. UNIT .. v[3])
end
if v[10] then return {'accepted', v[1], last, 'cancelled', v[8]} end
return {'accepted', v[1], last, 'cancelled'}
