-- A gateway's last local reader left. KEYS: meta. ARGV: gateway, id, channel prefix, publish command.
local m = KEYS[1]
local v = redis.call('HMGET', m, 'e', 'st', 'w', 'r')
if not v[1] then return 0 end
local left = without(v[3], ARGV[1])
redis.call('HSET', m, 'w', left)
if left == '' and v[2] == 'live' then
  redis.call('HSET', m, 'uw', 'L' .. now_ms())
  if v[4] ~= '' then
    redis.call(ARGV[4], ARGV[3] .. v[4], 'unwatched' .. UNIT .. ARGV[2] .. UNIT .. v[1] .. UNIT .. '0')
  end
end
return 1
