-- Put before the scripts of a pool, whose keys share the slot of KEYS[1], its prefix "sg:{pool:<name>}:". Behind it:
--   leases zset replica → expiry   board hash replica → seat   models hash replica → names, one a unit
--   work hash stream → work   at hash stream → replica that has it, "" in the queue   pin:<session> replica
--   q<tier> zset stream → start   f<tier> hash tenant → finish   ask hash stream → what its place in line rests on
--   over hash stream → how often another went before it although it was first
--   late zset stream → until when it waits   stat hash: v<tier> virtual time, popped, since, rate of the queue, n np no what
--     was asked for so far, qp<tier> qo<tier> prompt and output tokens in line, shed<tier> sent back what became of a surge
--   desired hash replica → state that somebody asked for   asker hash replica → who   <replica>:info JSON   <replica>:flight hash stream → costs
--   <replica>:inbox stream, <replica>:unread set of the streams in it, which reports look at: its bodies may be large
-- The law is ``stream_fabric/placement.py``.
local P = KEYS[1]
local SEAT = '<dBI4I4I4dddd' -- expires, ready, slots, room, in flight, prefill ms, decode ms, prefill/s, decode/s
local TIERS, SCAN_MAX, RATE_WINDOW_MS = 3, 64, 10000
local LOOK_AHEAD, PASSED_MAX, LOCALITY = 16, 16, 16

local function now_us()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

local function waiting_count()
  local count = 0
  for tier = 0, TIERS - 1 do count = count + redis.call('ZCARD', P .. 'q' .. tier) end
  return count
end

local function position(id)
  local before = 0
  for tier = 0, TIERS - 1 do
    local rank = redis.call('ZRANK', P .. 'q' .. tier, id)
    if rank then return before + rank + 1 end
    before = before + redis.call('ZCARD', P .. 'q' .. tier)
  end
  return 0
end

-- Put a stream into a replica's inbox and its costs on the replica's seat. since: when it was asked for, in us.
local function hand(id, payload, replica, prefill_ms, decode_ms, session, pin_ms, since)
  local key = P .. replica .. ':'
  redis.call('HSET', key .. 'flight', id, string.format('%.17g %.17g %s', prefill_ms, decode_ms, session))
  local at = now_us()
  redis.call('XADD', key .. 'inbox', '*', 's', id, 'w', payload, 't', string.format('%d %d', at - (since or at), at))
  redis.call('SADD', key .. 'unread', id)
  redis.call('HSET', P .. 'at', id, replica)
  local expires, ready, slots, room, _, prefill, decode, prefill_s, decode_s =
    struct.unpack(SEAT, redis.call('HGET', P .. 'board', replica))
  local count = redis.call('HLEN', key .. 'flight')
  redis.call('HSET', P .. 'board', replica, struct.pack(SEAT, expires, ready, slots, room, count,
    prefill + prefill_ms, decode + decode_ms, prefill_s, decode_s))
  if session ~= '' then redis.call('SET', P .. 'pin:' .. session, replica, 'PX', pin_ms) end
  return count < room
end

-- One more is to stand in a tier's line. Of an empty line the count begins anew, whatever earlier versions left.
local function count_waiting(tier, prompt, output)
  if redis.call('EXISTS', P .. 'q' .. tier) == 0 then
    redis.call('HSET', P .. 'stat', 'qp' .. tier, string.format('%d', prompt), 'qo' .. tier, string.format('%d', output))
  else
    redis.call('HINCRBY', P .. 'stat', 'qp' .. tier, string.format('%d', prompt))
    redis.call('HINCRBY', P .. 'stat', 'qo' .. tier, string.format('%d', output))
  end
end

-- Take a stream out of its tier's line. ask: what it asks.
local function forget(id, tier, ask)
  redis.call('ZREM', P .. 'q' .. tier, id)
  redis.call('ZREM', P .. 'late', id)
  redis.call('HDEL', P .. 'ask', id)
  redis.call('HDEL', P .. 'over', id)
  redis.call('HDEL', P .. 'at', id)
  if redis.call('EXISTS', P .. 'q' .. tier) == 1 then
    redis.call('HINCRBY', P .. 'stat', 'qp' .. tier, string.format('%d', -ask.prompt))
    redis.call('HINCRBY', P .. 'stat', 'qo' .. tier, string.format('%d', -ask.output))
    return false
  end
  redis.call('DEL', P .. 'f' .. tier)
  redis.call('HDEL', P .. 'stat', 'v' .. tier, 'qp' .. tier, 'qo' .. tier)
  return true
end

-- What a place in line rests on: model, until when it waits and since when (us), session, prompt tokens, output tokens, the replica the
-- session is bound to, the most that any replica held of the prompt, and of each that held some its name and how much.
local function asked(line)
  local model, wait_until, since, session, prompt, output, pin, most, held =
    string.match(line, '^([^\31]*)\31(%d+)\31(%d+)\31([^\31]*)\31(%d+)\31(%d+)\31([^\31]*)\31(%d+)\31(.*)$')
  return {model = model, wait_until = tonumber(wait_until), since = tonumber(since), session = session,
    prompt = tonumber(prompt), output = tonumber(output), pin = pin, most = tonumber(most), held = held}
end

local function held_by(ask, replica)
  local _, stop = string.find(ask.held, '\30' .. replica .. '\29', 1, true)
  return stop and tonumber(string.match(ask.held, '^%d+', stop + 1)) or 0
end

-- Its place in line as this replica sees it: earlier for what it holds of the prompt, and later for what another
-- holds more.
local function place_in_line(start, ask, replica)
  local here = ask.pin == replica and ask.prompt or held_by(ask, replica)
  return start - LOCALITY * (2 * here - ask.most)
end

-- Who goes to a replica that has room: of the first in line, the one whose prompt it holds most of. Returns its id, its
-- tier, what it asks, and the start of the first in line.
local function next_waiting(replica, serves, now)
  for tier = 0, TIERS - 1 do
    local line = redis.call('ZRANGE', P .. 'q' .. tier, 0, SCAN_MAX - 1, 'WITHSCORES')
    local seen, first, first_start, best, best_ask, best_key = 0, nil, nil, nil, nil, nil
    for i = 1, #line, 2 do
      local ask = asked(redis.call('HGET', P .. 'ask', line[i]))
      if serves[ask.model] and ask.wait_until > now then
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
      if best ~= first then redis.call('HINCRBY', P .. 'over', first, 1) end
      return best, tier, best_ask, first_start
    end
  end
end

local function count_popped(now)
  local v = redis.call('HMGET', P .. 'stat', 'popped', 'since')
  local popped, since = tonumber(v[1] or 0) + 1, tonumber(v[2] or 0)
  if now - since >= RATE_WINDOW_MS then
    if since > 0 then
      redis.call('HSET', P .. 'stat', 'rate', string.format('%.17g', popped * 1000 / (now - since)))
    end
    popped, since = 0, now
  end
  redis.call('HSET', P .. 'stat', 'popped', popped, 'since', string.format('%.17g', since))
end

-- Whoever is first in line goes to the replica, for as long as it has room.
local function pull(replica, now, pin_ms)
  local taken = {}
  local packed = redis.call('HGET', P .. 'board', replica)
  if not packed then return taken end
  local _, ready, _, room, count, _, _, prefill_s, decode_s = struct.unpack(SEAT, packed)
  local has_room = ready == 1 and count < room
  local serves
  while has_room do
    if not serves then
      if waiting_count() == 0 then break end
      serves = {}
      for name in string.gmatch(redis.call('HGET', P .. 'models', replica) or '', '[^\31]+') do serves[name] = true end
    end
    local id, tier, ask, start = next_waiting(replica, serves, now)
    if not id then break end
    -- Whoever goes ahead of its turn must not take the line's time with it: who comes now starts behind the first
    if not forget(id, tier, ask) and tonumber(start) > tonumber(redis.call('HGET', P .. 'stat', 'v' .. tier) or 0) then
      redis.call('HSET', P .. 'stat', 'v' .. tier, start)
    end
    count_popped(now)
    has_room = hand(id, redis.call('HGET', P .. 'work', id), replica,
      (ask.prompt - held_by(ask, replica)) / prefill_s * 1000, ask.output / decode_s * 1000, ask.session, pin_ms, ask.since)
    taken[#taken + 1] = id
  end
  return taken
end
