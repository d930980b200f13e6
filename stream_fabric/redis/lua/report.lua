-- An agent's report: streams that have ended and, when it renews its lease, everything that it runs. The streams in
-- flight
-- are rebuilt from its list and from what it has not read yet, so no count can drift.
-- KEYS: the pool's prefix. ARGV: replica, lease ttl ms or '' when it is not renewed, ready, slots, room, prefill ms,
--   decode ms, prefill tokens/s, decode tokens/s, models and region, info JSON, pin ms, generation, free KV tokens,
--   batch streams that would yield, how many ended, the ended streams; then of each running stream: id, session.
-- Returns {requested state or '', requests pulled from the queue, requests that still wait, who requested the state or
-- '', 1 when the pool did not know the replica's lease, queued requests that batch work yields to or -1 when it does
-- not, the running streams whose requests the pool has lost}.
local replica, ttl, ended = ARGV[1], ARGV[2], tonumber(ARGV[16])
local joins, lost = 0, {}
local key = P .. replica .. ':'
local at_us = now_us()
local now = math.floor(at_us / 1000)
for first = 17, 16 + ended, PART do
  local ids, own = {}, {}
  for i = first, math.min(first + PART - 1, 16 + ended) do ids[#ids + 1] = ARGV[i] end
  local costs_of = redis.call('HMGET', key .. 'flight', unpack(ids))
  redis.call('HDEL', key .. 'flight', unpack(ids))
  for i, at in ipairs(redis.call('HMGET', P .. 'at', unpack(ids))) do
    if not at or at == replica then own[#own + 1] = ids[i] end
    local session = costs_of[i] and string.match(costs_of[i], '^%S+ %S+ (.+)$')
    if session and redis.call('GET', P .. 'pin:' .. session) == replica then
      redis.call('PEXPIRE', P .. 'pin:' .. session, ARGV[12])
    end
  end
  if #own > 0 then
    redis.call('HDEL', P .. 'at', unpack(own))
    drop_work(own)
  end
end
local packed = redis.call('HGET', P .. 'board', replica)
local expires = packed and struct.unpack('<d', packed) or 0
local unread = {}
for i, id in ipairs(redis.call('SMEMBERS', key .. 'unread')) do
  unread[i] = {id, redis.call('HGET', key .. 'flight', id)}
end
if ttl ~= '' then
  expires = now + ttl
  joins = redis.call('ZADD', P .. 'leases', expires, replica)
  redis.call('SET', key .. 'info', ARGV[11], 'PX', POOL_TTL_MS)
  if redis.call('HGET', P .. 'generations', replica) ~= ARGV[13] then -- also after a failover that lost the last report
    redis.call('HSET', P .. 'generations', replica, ARGV[13])
    redis.call('ZADD', P .. 'changes', string.format('%d', at_us), replica)
    redis.call('ZREM', P .. 'gone', replica)
  end
  redis.call('HSET', P .. 'models', replica, ARGV[10])
  -- Only what changed is written: a replica may run thousands of streams, and Redis serves nobody meanwhile
  local kept, running = {}, {}
  for _, item in ipairs(unread) do kept[item[1]] = true end
  for i = 17 + ended, #ARGV, 2 do running[ARGV[i]] = true end
  local flight, costs_of = redis.call('HGETALL', key .. 'flight'), {}
  for i = 1, #flight, 2 do
    local id = flight[i]
    costs_of[id] = flight[i + 1]
    local session = not kept[id] and not running[id] and string.match(costs_of[id], '^%S+ %S+ (.*)$')
    if session and costs_of[id] ~= '0 0 ' .. session then
      -- The list may have been made before the replica read its inbox: it has to lack a stream twice
      redis.call('HSET', key .. 'flight', id, '0 0 ' .. session)
    elseif session then -- forgotten, also after a failover of Redis
      redis.call('HDEL', key .. 'flight', id)
      if redis.call('HGET', P .. 'at', id) == replica then
        redis.call('HDEL', P .. 'at', id)
        drop_work({id})
      end
    end
  end
  for first = 17 + ended, #ARGV, 2 * PART do
    local last, ids = math.min(first + 2 * PART - 1, #ARGV), {}
    for i = first, last, 2 do
      local costs = '0 0 ' .. ARGV[i + 1]
      if costs_of[ARGV[i]] ~= costs then redis.call('HSET', key .. 'flight', ARGV[i], costs) end
      ids[#ids + 1] = ARGV[i]
    end
    local owners = redis.call('HMGET', P .. 'owner', unpack(ids)) -- short, unlike the requests
    for i, at in ipairs(redis.call('HMGET', P .. 'at', unpack(ids))) do
      if not at then redis.call('HSETNX', P .. 'at', ids[i], replica) end
      if not owners[i] and (not at or at == replica) then lost[#lost + 1] = ids[i] end
    end
  end
  -- The keys of a pool that no agent renews expire, after the reapers had their time
  redis.call('PEXPIRE', key .. 'flight', POOL_TTL_MS)
  redis.call('PEXPIRE', key .. 'inbox', POOL_TTL_MS)
  redis.call('PEXPIRE', key .. 'unread', POOL_TTL_MS)
  for _, name in ipairs({'leases', 'board', 'models', 'work', 'owner', 'bytes', 'at', 'stat', 'desired', 'asker',
      'generations', 'changes', 'gone'}) do
    redis.call('PEXPIRE', P .. name, POOL_TTL_MS)
  end
end
if ttl ~= '' or packed then
  local prefill, decode = tonumber(ARGV[6]), tonumber(ARGV[7])
  for _, item in ipairs(unread) do
    local costs = item[2] and redis.call('HGET', key .. 'flight', item[1])
    if costs then
      local p, d = string.match(costs, '^(%S+) (%S+)')
      prefill, decode = prefill + p, decode + d
    end
  end
  packed = struct.pack(SEAT .. 'dI4', expires, tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]),
    redis.call('HLEN', key .. 'flight'), prefill, decode, tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[14]),
    tonumber(ARGV[15]))
  redis.call('HSET', P .. 'board', replica, packed)
end
local taken, waiting = pull(replica, packed, at_us, ARGV[12])
local yield_to = -1
if batch_yields(now) then
  yield_to = 0
  for tier = 0, BATCH_TIER - 1 do yield_to = yield_to + redis.call('ZCARD', P .. 'q' .. tier) end
  local lanes = pinned_lanes()
  local region = lanes and region_in(redis.call('HGET', P .. 'models', replica))
  for _, lane in ipairs(lanes or {}) do
    if lane.tier < BATCH_TIER and admits(lane.regions, region) then
      yield_to = yield_to + redis.call('ZCARD', P .. 'q' .. lane.name)
    end
  end
end
return {redis.call('HGET', P .. 'desired', replica) or '', #taken, waiting or waiting_count(),
  redis.call('HGET', P .. 'asker', replica) or '', joins, yield_to, lost}
