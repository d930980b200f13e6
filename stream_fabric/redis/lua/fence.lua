-- End a stream whose producer is gone. The epoch rises, so the old producer can append nothing more.
-- What it used has no bill yet: the stream is among the unbilled ones until its bill is written.
-- A call that is sent again, because its reply was lost, is told that it fenced.
-- KEYS: meta, log. ARGV: id, replica it is lost with ('' any), nonce of the new epoch, error JSON, channel prefix,
--   publish command, retention ms, epoch that no other may have followed ('' any), 1 if its request is withdrawn: then
--   what it used counts nowhere, and nothing is settled.
-- Returns {code, epoch, last}: 0 fenced, 1 not live, 2 has another producer, 3 none; and the stream's tenant and usage
--   if this call fenced it and its tenant's account must settle it.
local m, l = KEYS[1], KEYS[2]
local v = redis.call('HMGET', m, 'e', 's', 'st', 'w', 'r', 'us', 'b', 't', 'ac')
if not v[1] then return {3, '', 0} end
local last = tonumber(v[2])
if v[3] ~= 'live' then
  return {string.match(v[1], '[^.]*$') == ARGV[3] and 0 or 1, v[1], last}
end
if ARGV[2] ~= '' and v[5] ~= '' and v[5] ~= ARGV[2] then return {2, v[1], last} end
if ARGV[8] ~= '' and v[1] ~= ARGV[8] and tonumber(epoch_number(v[1])) >= tonumber(epoch_number(ARGV[8])) then
  return {2, v[1], last}
end
local n = epoch_number(v[1]) + 1
local epoch = n .. '.' .. ARGV[3]
local used = ARGV[9] == '1' and '' or v[6]
redis.call('HSET', m, 'e', epoch, 'b', v[7] .. n .. ':' .. v[2] .. ' ', 'us', used)
finish(m, l, ARGV[1], epoch, last,
  '{"k":"end","status":"failed","usage":' .. usage_json(used) .. ',"error":' .. ARGV[4] .. '}', 'failed', v[4],
  ARGV[5], ARGV[6], ARGV[7], v[8], used)
if used ~= '' then -- no caller names the key, so in a slot that moves to another node this may fail
  local unbilled = string.match(m, '^sg:{[^}]*}:') .. 'unbilled'
  redis.pcall('ZADD', unbilled, now_ms(), ARGV[1])
  redis.pcall('PEXPIRE', unbilled, UNBILLED_MS)
end
if v[5] ~= '' then
  redis.call(ARGV[6], ARGV[5] .. v[5], 'fence' .. UNIT .. ARGV[1] .. UNIT .. v[1] .. UNIT .. v[2])
end
if v[9] and ARGV[9] ~= '1' then return {0, epoch, last + 1, v[8], v[6]} end
return {0, epoch, last + 1}
