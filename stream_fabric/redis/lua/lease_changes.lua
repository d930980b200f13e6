-- What changed in a pool for routing, for a gateway. Reads only.
-- KEYS: the pool's prefix. ARGV: moment of the last read in us (0: all replicas), position of the last block change
--   read ('' none are wanted, 0 from now on), how many block changes at most.
-- Returns {moment, 1 when all replicas follow, leases, streams, changed: name and info of each, gone, expired,
-- position, block changes: replica and change of each}.
-- Moments are Redis's clock: they go on after a failover or a total loss.
local PART = 1000 -- replicas of one command: Lua's stack holds 8,000 values
local since = tonumber(ARGV[1])
local at = now_us()
local whole, names, gone = since == 0 or since < at - GONE_KEPT_MS * 1000, nil, {}
if whole then
  names = redis.call('ZRANGE', P .. 'leases', 0, -1)
else
  local from = string.format('%d', since)
  names = redis.call('ZRANGEBYSCORE', P .. 'changes', from, '+inf')
  gone = redis.call('ZRANGEBYSCORE', P .. 'gone', from, '+inf')
end
local changed = {}
for first = 1, #names, PART do
  local keys = {}
  for i = first, math.min(first + PART - 1, #names) do keys[#keys + 1] = P .. names[i] .. ':info' end
  for i, info in ipairs(redis.call('MGET', unpack(keys))) do
    changed[#changed + 1] = names[first + i - 1]
    changed[#changed + 1] = info or ''
  end
end
local position, blocks = ARGV[2], {}
if position == '0' then
  position = string.format('%d-0', now_ms() - 1)
elseif position ~= '' then
  for _, entry in ipairs(redis.call('XRANGE', P .. 'blocks', '(' .. position, '+', 'COUNT', ARGV[3])) do
    position = entry[1]
    blocks[#blocks + 1] = entry[2][2]
    blocks[#blocks + 1] = entry[2][4]
  end
end
return {at, whole and 1 or 0, redis.call('ZCARD', P .. 'leases'), redis.call('HLEN', P .. 'at'), changed, gone,
  redis.call('ZRANGEBYSCORE', P .. 'leases', '-inf', '(' .. now_ms()), position, blocks}
