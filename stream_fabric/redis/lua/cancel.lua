-- The one place where a cancel happens: after it answers "accepted at s" no data frame above s exists. A steer is a
-- cancel after which the answer counts as cut: its choice ends with the reason "steered".
-- KEYS: meta, log. ARGV: id, tenant, channel prefix, publish command, retention ms, pending ttl ms, only when
--   nobody has watched for this many ms ('' always), 1 to steer.
-- Returns {result, epoch, at, status}, and the stream's usage if it has ended now and its tenant's account must settle
--   it.
local m, l, id, tenant, steers = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[8] == '1'
local v = redis.call('HMGET', m, 'e', 't', 's', 'st', 'cx', 'w', 'r', 'us', 'uw', 'ac', 'o')
if not v[1] then
  if steers or ARGV[7] ~= '' then return {'none', '', 0, ''} end
  if v[2] and v[2] ~= tenant then return {'none', '', 0, ''} end
  redis.call('HSET', m, 'cx', '0', 't', tenant)
  redis.call('PEXPIRE', m, ARGV[6])
  return {'pending', '', 0, ''}
end
if v[2] ~= tenant then return {'none', '', 0, ''} end
local last = tonumber(v[3])
if v[4] == 'cancelled' then return {'already', v[1], tonumber(v[5]), v[4]} end
if v[4] ~= 'live' or steers and is_answered(v[11]) then return {'terminal', v[1], last, v[4]} end
if steers and string.find(v[11], '"kind":"tool"', 1, true) then return {'tools', v[1], last, v[4]} end
if ARGV[7] ~= '' then
  local since = tonumber(string.match(v[9], '%d+'))
  if not since or now_ms() - since < tonumber(ARGV[7]) then return {'watched', v[1], last, v[4]} end
end
redis.call('HSET', m, 'cx', v[3])
local status = steers and 'incomplete' or 'cancelled'
finish(m, l, id, v[1], last, '{"k":"end","status":"' .. status .. '","usage":' .. usage_json(v[8]) .. '}', status,
  v[6], ARGV[3], ARGV[4], ARGV[5], tenant, v[8], steers and STEERED .. '\n')
if steers then redis.call('HSET', m, 'o', v[11] .. string.format('%d', last + 1) .. ' ' .. STEERED .. '\n') end
if v[7] ~= '' then
  redis.call(ARGV[4], ARGV[3] .. v[7], (steers and 'steer' or 'cancel') .. UNIT .. id .. UNIT .. v[1] .. UNIT .. v[3])
end
if v[10] then return {'accepted', v[1], last, status, v[8]} end
return {'accepted', v[1], last, status}
