-- Begin a new epoch for a live stream whose producer is gone; another replica will append in it.
-- Concurrent calls get the same epoch: it rises once until a producer appends in it.
-- KEYS: meta, log. ARGV: id, epoch that is lost, nonce of the new epoch, channel prefix, publish command,
-- ms that a live stream is kept: the new producer may have to wait for as long as a queue allows.
-- Returns {code, epoch, last}: 0 taken over, 1 not live, 2 has another producer, 3 no such stream.
local m = KEYS[1]
local v = redis.call('HMGET', m, 'e', 's', 'st', 'r', 'b')
if not v[1] then return {3, '', 0} end
local last = tonumber(v[2])
if v[3] ~= 'live' then return {1, v[1], last} end
local n = epoch_number(ARGV[2]) + 1
if v[1] ~= ARGV[2] then
  if v[4] == '' and tonumber(epoch_number(v[1])) == n then return {0, v[1], last} end
  return {2, v[1], last}
end
local epoch = string.format('%d.%s', n, ARGV[3])
redis.call('HSET', m, 'e', epoch, 'b', v[5] .. string.format('%d', n) .. ':' .. v[2] .. ' ', 'r', '', 'x', '0')
redis.call('PEXPIRE', m, ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
expire_inputs(m, ARGV[6])
if v[4] ~= '' then
  redis.call(ARGV[5], ARGV[4] .. v[4], 'fence' .. UNIT .. ARGV[1] .. UNIT .. v[1] .. UNIT .. v[2])
end
return {0, epoch, last}
