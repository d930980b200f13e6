-- Add an item to a stream's durable inputs. KEYS: meta, inputs. ARGV: id, tenant, input id, item JSON, inputs at most,
--   bytes at most, live ttl ms, channel prefix, publish command, inputs at most that wait for the producer,
--   moment in Unix microseconds, 17 digits.
-- Returns 0 accepted (also a call whose reply was lost), 1 duplicate, 2 too many, 3 the answer has ended, 4 no stream,
--   5 too many bytes, 6 too many wait, 7 the id has another item.
local v = redis.call('HMGET', KEYS[1], 'e', 't', 'st', 'r', 'ib', 'o', 'ia', 'in')
if not v[1] or v[2] ~= ARGV[2] then return 4 end
local held = redis.call('HGET', KEYS[2], ARGV[3])
if held then
  local digits, item = string.match(held, '^(%d+) (.*)$')
  if item ~= ARGV[4] then return 7 end
  return string.sub(digits, -17) == ARGV[11] and tonumber(ARGV[11]) > 0 and 0 or 1
end
if v[3] ~= 'live' or is_answered(v[6]) then return 3 end
local count = tonumber(v[8] or 0) -- of lost ones too: the producer compares it
if count >= tonumber(ARGV[5]) then return 2 end
if count - (v[7] or 0) >= tonumber(ARGV[10]) then return 6 end
local size = #ARGV[3] + #ARGV[4]
if (v[5] or 0) + size > tonumber(ARGV[6]) then return 5 end
redis.call('HSET', KEYS[1], 'ib', string.format('%d', (v[5] or 0) + size), 'in', string.format('%d', count + 1))
redis.call('HSET', KEYS[2], ARGV[3], count .. ARGV[11] .. ' ' .. ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[7])
if v[4] ~= '' then
  redis.call(ARGV[9], ARGV[8] .. v[4], 'input' .. UNIT .. ARGV[1] .. UNIT .. v[1] .. UNIT .. '0')
end
return 0
