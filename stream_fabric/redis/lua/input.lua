-- KEYS: meta, inputs. ARGV: id, tenant, input id, item JSON, inputs at most, live ttl ms, channel prefix, publish
--   command. Returns 0 accepted, 1 duplicate, 2 full, 3 not live, 4 no stream.
local v = redis.call('HMGET', KEYS[1], 'e', 't', 'st', 'r')
if not v[1] or v[2] ~= ARGV[2] then return 4 end
if redis.call('HEXISTS', KEYS[2], ARGV[3]) == 1 then return 1 end
if v[3] ~= 'live' then return 3 end
local count = redis.call('HLEN', KEYS[2])
if count >= tonumber(ARGV[5]) then return 2 end
redis.call('HSET', KEYS[2], ARGV[3], count .. ' ' .. ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
if v[4] ~= '' then
  redis.call(ARGV[8], ARGV[7] .. v[4], 'input' .. UNIT .. ARGV[1] .. UNIT .. v[1] .. UNIT .. '0')
end
return 0
