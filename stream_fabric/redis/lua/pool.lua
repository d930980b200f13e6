-- Prefix of the scripts of a pool. All its keys begin with KEYS[1], "sg:{pool:<name>}:", and share its slot:
--   leases zset replica → expiry   board (the load table) hash replica → packed replica slot   models hash replica →
--   names, and \27 with the replica's region
--   work hash stream → request   owner hash stream → tenant   bytes hash tenant → bytes of its requests, '' of all
--   at hash stream → replica that has it, '' while queued   pin:<session> replica
--   q<tier> zset stream → start in virtual time   f<tier> hash tenant → finish   ask hash stream → queue entry
--   q<tier><regions> the same of requests that are bound to regions (each after a \27, and one \27 at the end), which
--     form a lane; lanes set of "<tier><regions>", the lanes with requests
--   over hash stream → times that another request overtook it while it was first   late zset stream → end of its wait
--   stat hash: v<tier> virtual time; popped, since, rate: how fast the queue moves; n, np, no: demand totals; qp<lane>,
--     qo<lane>: queued prompt and output tokens; shed<tier>, sent, back, yielded: overload totals; yields: end of the
--     time that batch work yields; refused: moment of the last refusal
--   desired hash replica → requested state   asker hash replica → who requested it
--   generations hash replica → generation of its last report   changes, gone zset replica → moment of its last change
--     for routing, or when it left, in us   blocks stream of changes of what replicas have cached
--   <replica>:calls stream whose entry asks the replica to report now, because its batch streams have to yield
--   <replica>:info JSON   <replica>:flight hash stream → load   <replica>:inbox stream   <replica>:unread set of
--   streams in
--     the inbox; reports read it instead of the inbox, whose entries may be large
-- The specification is ``stream_fabric/pool/state.py``.
local P = KEYS[1]
local SEAT = '<dBI4I4I4dddd' -- expires, ready, slots, room, in flight, prefill ms, decode ms, prefill/s, decode/s
-- Then the free tokens of its KV cache as '<d', below 0: unknown, and the batch streams that would yield as '<I4'.
-- Scripts of earlier versions leave them out until the next report.
local SEAT_BYTES = struct.size(SEAT)

local PART = 1000 -- values of one command: Lua's stack holds 8,000

local function now_us()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

-- Requests are kept until their streams end. owner: hash stream → "<bytes of its request> <tenant>". bytes: the sums by
-- tenant, and of all in the field ''. Only keep_work and drop_work change them; recount_bytes makes the sums again,
-- because scripts of the previous version remove requests without counting.
local function owner_in(line)
  local size, tenant = string.match(line or '', '^(%d+) (.*)$')
  return tonumber(size), tenant
end

-- Subtract the bytes of these requests. At most PART ids.
local function disown(ids)
  local totals, tenants, sizes, seen = {}, {''}, {0}, {}
  for i, line in ipairs(redis.call('HMGET', P .. 'owner', unpack(ids))) do
    local size, tenant = owner_in(line)
    if size and not seen[ids[i]] then
      seen[ids[i]] = true
      sizes[1] = sizes[1] - size
      totals[tenant] = (totals[tenant] or 0) - size
    end
  end
  if sizes[1] == 0 then return end
  for tenant, size in pairs(totals) do tenants[#tenants + 1], sizes[#sizes + 1] = tenant, size end
  redis.call('HDEL', P .. 'owner', unpack(ids))
  add_to(P .. 'bytes', tenants, sizes)
end

-- Forget requests. At most PART ids.
local function drop_work(ids)
  redis.call('HDEL', P .. 'work', unpack(ids))
  if redis.call('EXISTS', P .. 'work') == 0 then
    redis.call('DEL', P .. 'owner', P .. 'bytes')
  else
    disown(ids)
  end
end

-- held: the sums of all and of the tenant, if the caller has read them.
local function keep_work(id, payload, tenant, held)
  if redis.call('HSET', P .. 'work', id, payload) == 0 then
    disown({id}) -- it replaces an earlier request of the same stream
    held = nil
  elseif redis.call('HLEN', P .. 'work') == 1 then
    redis.call('DEL', P .. 'owner', P .. 'bytes') -- what the previous version left
    held = {}
  end
  redis.call('HSET', P .. 'owner', id, #payload .. ' ' .. tenant)
  add_to(P .. 'bytes', {'', tenant}, {#payload, #payload}, held)
end

local function recount_bytes()
  local totals = {['']=0}
  for _, id in ipairs(redis.call('HKEYS', P .. 'owner')) do
    local size, tenant = owner_in(redis.call('HGET', P .. 'owner', id))
    if size and redis.call('HEXISTS', P .. 'work', id) == 1 then
      totals[''] = totals[''] + size
      totals[tenant] = (totals[tenant] or 0) + size
    else
      redis.call('HDEL', P .. 'owner', id)
    end
  end
  redis.call('DEL', P .. 'bytes')
  for tenant, size in pairs(totals) do redis.call('HSET', P .. 'bytes', tenant, string.format('%d', size)) end
end

-- Which bound another request of this size would pass: 0 none, 6 the pool's, 7 the tenant's; and the sums of both.
local function over_bytes(tenant, size, pool_max, tenant_max)
  local held = redis.call('HMGET', P .. 'bytes', '', tenant)
  if (held[1] or 0) + size > pool_max then return 6, held end
  if (held[2] or 0) + size > tenant_max then return 7, held end
  return 0, held
end

-- Lanes of requests that are bound to regions; nil: none wait.
local function pinned_lanes()
  local names = redis.call('SMEMBERS', P .. 'lanes')
  if not names[1] then return nil end
  local found = {}
  for i, name in ipairs(names) do
    local tier, regions = string.match(name, '^(%d+)(.*)$')
    found[i] = {tier = tonumber(tier), regions = regions, name = name}
  end
  return found
end

-- May a replica of the region ('\27' and its name, '' none) serve requests that are bound to these regions?
local function admits(regions, region)
  return region ~= '' and string.find(regions, region .. '\27', 1, true) ~= nil
end

local function region_in(names) return string.match(names or '', '\27[^\31]*') or '' end

-- Number of requests in these lanes.
local function pinned_count(lanes)
  local count = 0
  for _, lane in ipairs(lanes or {}) do count = count + redis.call('ZCARD', P .. 'q' .. lane.name) end
  return count
end

-- How many wait, and the lanes of those that are bound to regions.
local function waiting_count()
  local lanes = pinned_lanes()
  local count = pinned_count(lanes)
  for tier = 0, TIERS - 1 do count = count + redis.call('ZCARD', P .. 'q' .. tier) end
  return count, lanes
end

local function batch_yields(now)
  local left_ms = (redis.call('HGET', P .. 'stat', 'yields') or 0) - now
  return left_ms > 0 and left_ms <= YIELD_MS -- more: the clock has gone back
end

-- Its position among the requests of its lane and those that are bound to no region.
local function position(id)
  local before = 0
  for tier = 0, TIERS - 1 do
    local rank = redis.call('ZRANK', P .. 'q' .. tier, id)
    if rank then return before + rank + 1 end
    before = before + redis.call('ZCARD', P .. 'q' .. tier)
  end
  local regions = string.match(redis.call('HGET', P .. 'ask', id) or '', '^[^\31\27]*(\27[^\31]*)')
  if not regions then return 0 end
  before = 0
  for tier = 0, TIERS - 1 do
    local lane = P .. 'q' .. tier .. regions
    local rank = redis.call('ZRANK', lane, id)
    if rank then
      local start = redis.call('ZSCORE', lane, id)
      return before + rank + 1 + redis.call('ZCOUNT', P .. 'q' .. tier, '-inf', '(' .. start)
    end
    before = before + redis.call('ZCARD', P .. 'q' .. tier) + redis.call('ZCARD', lane)
  end
  return 0
end

-- The free tokens of a replica's KV cache.
local function kv_in(packed)
  if #packed < SEAT_BYTES + 8 then return -1 end
  local free = struct.unpack('<d', packed, SEAT_BYTES + 1)
  return free
end

local function yieldable_in(packed)
  if #packed < SEAT_BYTES + 12 then return 0 end
  local count = struct.unpack('<I4', packed, SEAT_BYTES + 9)
  return count
end

-- As ``ReplicaSlot.has_kv_for``.
local function has_kv_for(kv, count, prefill, decode, prefill_s, decode_s, prompt, output)
  return kv < 0 or count == 0
    or prompt + output <= kv - prefill * prefill_s / 1000 - KV_PENDING_WEIGHT * decode * decode_s / 1000
end

-- Put a request into a replica's inbox and its load on the replica's slot. packed: the slot as the board has it; at,
-- since: now and when it was queued, in us. Returns the slot as the board has it then, and whether there is more room.
local function hand(id, payload, replica, packed, prefill_ms, decode_ms, session, pin_ms, at, since)
  local key = P .. replica .. ':'
  redis.call('HSET', key .. 'flight', id, string.format('%.17g %.17g %s', prefill_ms, decode_ms, session))
  redis.call('XADD', key .. 'inbox', '*', 's', id, 'w', payload, 't', string.format('%d %d', at - (since or at), at))
  redis.call('SADD', key .. 'unread', id)
  redis.call('HSET', P .. 'at', id, replica)
  local expires, ready, slots, room, _, prefill, decode, prefill_s, decode_s = struct.unpack(SEAT, packed)
  local count = redis.call('HLEN', key .. 'flight')
  packed = struct.pack(SEAT .. 'dI4', expires, ready, slots, room, count, prefill + prefill_ms, decode + decode_ms,
    prefill_s, decode_s, kv_in(packed), yieldable_in(packed))
  redis.call('HSET', P .. 'board', replica, packed)
  if session ~= '' then redis.call('SET', P .. 'pin:' .. session, replica, 'PX', pin_ms) end
  return packed, count < room
end

-- Count a request that joins a lane. An empty one counts from zero, whatever earlier versions left.
local function count_waiting(lane, prompt, output)
  if redis.call('EXISTS', P .. 'q' .. lane) == 0 then
    redis.call('HSET', P .. 'stat', 'qp' .. lane, string.format('%d', prompt), 'qo' .. lane, string.format('%d', output))
  else
    redis.call('HINCRBY', P .. 'stat', 'qp' .. lane, string.format('%d', prompt))
    redis.call('HINCRBY', P .. 'stat', 'qo' .. lane, string.format('%d', output))
  end
end

local function tier_waits(tier)
  if redis.call('EXISTS', P .. 'q' .. tier) == 1 then return true end
  for _, lane in ipairs(pinned_lanes() or {}) do
    if lane.tier == tier then return true end
  end
  return false
end

-- Take a stream out of its lane. ask: its queue entry. Returns whether its tier is empty then.
local function forget(id, tier, ask)
  local lane = tier .. ask.regions
  redis.call('ZREM', P .. 'q' .. lane, id)
  redis.call('ZREM', P .. 'late', id)
  redis.call('HDEL', P .. 'ask', id)
  redis.call('HDEL', P .. 'over', id)
  redis.call('HDEL', P .. 'at', id)
  if redis.call('EXISTS', P .. 'q' .. lane) == 1 then
    redis.call('HINCRBY', P .. 'stat', 'qp' .. lane, string.format('%d', -ask.prompt))
    redis.call('HINCRBY', P .. 'stat', 'qo' .. lane, string.format('%d', -ask.output))
    return false
  end
  redis.call('HDEL', P .. 'stat', 'qp' .. lane, 'qo' .. lane)
  if ask.regions ~= '' then redis.call('SREM', P .. 'lanes', lane) end
  if tier_waits(tier) then return false end
  redis.call('DEL', P .. 'f' .. tier)
  redis.call('HDEL', P .. 'stat', 'v' .. tier)
  return true
end

-- Decode a queue entry: model and the regions that it is bound to, end of its wait (ms), start of its wait (us),
-- session, prompt tokens, output tokens, the
-- replica that the session is bound to, the most tokens that a replica has cached; held: each replica with its cached
-- tokens, then the replicas that produced the stream before.
local function asked(line)
  local model, regions, wait_until, since, session, prompt, output, pin, most, held =
    string.match(line, '^([^\31\27]*)([^\31]*)\31(%d+)\31(%d+)\31([^\31]*)\31(%d+)\31(%d+)\31([^\31]*)\31(%d+)\31(.*)$')
  return {model = model, regions = regions, wait_until = tonumber(wait_until), since = tonumber(since), session = session,
    prompt = tonumber(prompt), output = tonumber(output), pin = pin, most = tonumber(most), held = held}
end

local function held_by(ask, replica)
  local _, stop = string.find(ask.held, '\30' .. replica .. '\29', 1, true)
  return stop and tonumber(string.match(ask.held, '^%d+', stop + 1)) or 0
end

-- May the replica take the request? One that produced the stream before may not while another one serves the model.
local function may_take(replica, serves, ask, now)
  if not serves[ask.model] or ask.wait_until <= now then return false end
  if not string.find(ask.held, '\28' .. replica .. '\28', 1, true) then return true end
  local board = redis.call('HGETALL', P .. 'board')
  for i = 1, #board, 2 do
    local expires, ready = struct.unpack(SEAT, board[i + 1])
    if ready == 1 and expires > now and not string.find(ask.held, '\28' .. board[i] .. '\28', 1, true) then
      local models = '\31' .. (redis.call('HGET', P .. 'models', board[i]) or '') .. '\31'
      if string.find(models, '\31' .. ask.model .. '\31', 1, true)
          and (ask.regions == '' or admits(ask.regions, region_in(models))) then
        return false
      end
    end
  end
  return true
end

-- Its place for this replica: earlier for what the replica has cached, later for what others have cached.
local function place_in_line(start, ask, replica)
  local here = ask.pin == replica and ask.prompt or held_by(ask, replica)
  return start - LOCALITY * (2 * here - ask.most)
end

-- Put the first requests of the lanes that a replica of this region may serve among those of the tier.
local function with_lanes(line, tier, lanes, region)
  local all, count = {}, 0
  for i = 1, #line, 2 do all[#all + 1] = {line[i], line[i + 1], tonumber(line[i + 1])} end
  for _, lane in ipairs(lanes) do
    if lane.tier == tier and admits(lane.regions, region) then
      local more = redis.call('ZRANGE', P .. 'q' .. lane.name, 0, SCAN_MAX - 1, 'WITHSCORES')
      count = count + #more
      for i = 1, #more, 2 do all[#all + 1] = {more[i], more[i + 1], tonumber(more[i + 1])} end
    end
  end
  if count == 0 then return line end
  table.sort(all, function(a, b) return a[3] < b[3] or (a[3] == b[3] and a[1] < b[1]) end)
  local merged = {}
  for i, item in ipairs(all) do merged[2 * i - 1], merged[2 * i] = item[1], item[2] end
  return merged
end

-- The request that a replica with room takes next: among the first ones, the one with most of its prompt cached.
-- last_tier: requests of lower tiers are left; lanes: see waiting_count; region: the replica's. Returns its id, its
-- tier, its queue entry, and the start of the first
-- request; nothing when the replica's KV cache has no room for it: then no smaller request overtakes it.
local function next_waiting(replica, packed, serves, now, last_tier, lanes, region)
  for tier = 0, last_tier do
    local line = redis.call('ZRANGE', P .. 'q' .. tier, 0, SCAN_MAX - 1, 'WITHSCORES')
    if lanes then line = with_lanes(line, tier, lanes, region) end
    local seen, first, first_start, best, best_ask, best_key = 0, nil, nil, nil, nil, nil
    for i = 1, #line, 2 do
      local ask = asked(redis.call('HGET', P .. 'ask', line[i]))
      if may_take(replica, serves, ask, now) then
        seen = seen + 1
        local key = place_in_line(tonumber(line[i + 1]), ask, replica)
        if not best or key < best_key then best, best_ask, best_key = line[i], ask, key end
        if not first then
          first, first_start = line[i], line[i + 1]
          if tonumber(redis.call('HGET', P .. 'over', first) or 0) >= PASSED_MAX then break end
        end
        if seen == LOOK_AHEAD then break end
      end
    end
    if best then
      local _, _, _, _, count, prefill, decode, prefill_s, decode_s = struct.unpack(SEAT, packed)
      local rest = best_ask.prompt - held_by(best_ask, replica)
      if not has_kv_for(kv_in(packed), count, prefill, decode, prefill_s, decode_s, rest, best_ask.output) then
        return nil
      end
      if best ~= first then redis.call('HINCRBY', P .. 'over', first, 1) end
      return best, tier, best_ask, first_start
    end
  end
end

local function count_popped(now)
  local v = redis.call('HMGET', P .. 'stat', 'popped', 'since')
  local popped, since = tonumber(v[1] or 0) + 1, tonumber(v[2] or 0)
  if math.abs(now - since) >= RATE_WINDOW_MS then
    if since > 0 and now > since then -- the clock may have gone back
      redis.call('HSET', P .. 'stat', 'rate', string.format('%.17g', popped * 1000 / (now - since)))
    end
    popped, since = 0, now
  end
  redis.call('HSET', P .. 'stat', 'popped', popped, 'since', string.format('%.17g', since))
end

-- Hand queued requests to the replica while it has room. packed: its slot as the board has it; at_us: now. Returns the
-- requests, and how many wait if that is known.
local function pull(replica, packed, at_us, pin_ms)
  local taken, now = {}, math.floor(at_us / 1000)
  if not packed then return taken end
  local _, ready, _, room, count, _, _, prefill_s, decode_s = struct.unpack(SEAT, packed)
  local has_room = ready == 1 and count < room
  local serves, lanes, region
  while has_room do
    if not serves then
      local waiting
      waiting, lanes = waiting_count()
      if waiting == 0 then return taken, 0 end
      local names = redis.call('HGET', P .. 'models', replica) or ''
      serves, region = {}, region_in(names)
      for name in string.gmatch(names, '[^\31]+') do serves[name] = true end
    end
    local _, _, _, _, _, prefill = struct.unpack(SEAT, packed)
    local last_tier = (batch_yields(now) or prefill > BATCH_AHEAD_MS) and BATCH_TIER - 1 or TIERS - 1
    local id, tier, ask, start = next_waiting(replica, packed, serves, now, last_tier, lanes, region)
    if not id then break end
    -- Virtual time follows the first request, not one that overtook it: new requests start behind the first
    if not forget(id, tier, ask) and tonumber(start) > tonumber(redis.call('HGET', P .. 'stat', 'v' .. tier) or 0) then
      redis.call('HSET', P .. 'stat', 'v' .. tier, start)
    end
    count_popped(now)
    packed, has_room = hand(id, redis.call('HGET', P .. 'work', id), replica, packed,
      (ask.prompt - held_by(ask, replica)) / prefill_s * 1000, ask.output / decode_s * 1000, ask.session, pin_ms, at_us,
      ask.since)
    taken[#taken + 1] = id
  end
  return taken
end
