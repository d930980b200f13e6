-- Add an item to a stream's durable inputs. KEYS: meta, inputs. ARGV: id, tenant, input id, item JSON, inputs at most,
--   bytes at most, live ttl ms, channel prefix, publish command.
-- Returns 0 accepted, 1 duplicate, 2 too many, 3 not live, 4 no stream, 5 too many bytes.
local v = redis.call('HMGET', KEYS[1], 'e', 't', 'st', 'r', 'ib')
if not v[1] or v[2] ~= ARGV[2] then return 4 end
if redis.call('HEXISTS', KEYS[2], ARGV[3]) == 1 then return 1 end
if v[3] ~= 'live' then return 3 end
local count = redis.call('HLEN', KEYS[2])
if count >= tonumber(ARGV[5]) then return 2 end
local size = #ARGV[3] + #ARGV[4]
if (v[5] or 0) + size > tonumber(ARGV[6]) then return 5 end
redis.call('HINCRBY', KEYS[1], 'ib', size)
redis.call('HSET', KEYS[2], ARGV[3], count .. ' ' .. ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[7])
if v[4] ~= '' then
  redis.call(ARGV[9], ARGV[8] .. v[4], 'input' .. UNIT .. ARGV[1] .. UNIT .. v[1] .. UNIT .. '0')
end
return 0
