-- Prefix of every script. A stream's meta is a hash:
--   e epoch "n.nonce"   s last seq   st status   cx seq it was cancelled at   r replica that produces it
--   w ids of the gateways that watch, each followed by a space   uw since when no gateway watches: "L<ms>" the
--   last reader left, "V<ms>" the last gateway vanished, "" watched   us usage, five integers   b bases "n:seq "
--   t tenant   f facts for the encoder   o structural frames "seq line\n"   x when its expiry was last set, ms
--   mo model that its usage is counted under   ib bytes of its inputs   ac 1 if its tenant's account holds a
--   reservation for it   rt ms that it is kept after its end, where its plan says so; 0: until it was read
--   fg 1 once it was read and its content is deleted   in number of its inputs   ia how many of them its producer has
--   answered
local UNIT, RECORD = '\31', '\30'
local HOUR_MS = 60 * 60 * 1000
local STEERED = '{"k":"choice-end","choice":0,"finish_reason":"steered"}'

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- Whether the structural frames hold the end of a choice: then the answer is complete, or cut.
local function is_answered(structure)
  return string.find(structure or '', ' {"k":"choice-end"', 1, true) ~= nil
end

local function epoch_number(epoch)
  return string.match(epoch, '^%d+')
end

local function part(id, epoch, first, last, frames)
  return id .. UNIT .. epoch .. UNIT .. first .. UNIT .. last .. UNIT .. frames
end

local function without(watchers, gateway)
  local kept = {}
  for gw in string.gmatch(watchers, '%S+') do
    if gw ~= gateway then kept[#kept + 1] = gw .. ' ' end
  end
  return table.concat(kept)
end

local function usage_json(us)
  local p, c, w, o, r = string.match(us or '', '(%d+) (%d+) (%d+) (%d+) (%d+)')
  if not p then return '{"prompt":0,"cached":0,"written":0,"output":0,"reasoning":0}' end
  return '{"prompt":' .. p .. ',"cached":' .. c .. ',"written":' .. w .. ',"output":' .. o .. ',"reasoning":' .. r .. '}'
end

-- Add whole numbers to fields of a hash, in two calls. held: the fields, if the caller has read them. Returns them as
-- they were.
local function add_to(key, fields, numbers, held)
  held = held or redis.call('HMGET', key, unpack(fields))
  local sums = {}
  for i, field in ipairs(fields) do
    sums[2 * i - 1], sums[2 * i] = field, string.format('%d', (held[i] or 0) + numbers[i])
  end
  redis.call('HSET', key, unpack(sums))
  return held
end

-- Count a stream's usage to its tenant, in the step that gives it its one terminal. Fields of an hour's hash: model, a
-- space, and which figure: 0 streams, then the five of us. A stream that no producer had begun, such as that of a
-- refused request, has no us and no bill.
local function settle(m, tenant, us, model, now)
  if (us or '') == '' then return end
  local key = string.match(m, '^sg:{[^}]*}:') .. 'usage:' .. tenant .. ':' .. math.floor(now / HOUR_MS)
  local fields, figures, kind = {model .. ' 0'}, {1}, 1
  for figure in string.gmatch(us, '%d+') do
    if figure ~= '0' then fields[#fields + 1], figures[#figures + 1] = model .. ' ' .. kind, figure end
    kind = kind + 1
  end
  local held = add_to(key, fields, figures)
  if not held[1] then redis.call('PEXPIRE', key, USAGE_TTL_MS) end
end

-- Time that an ended stream is kept. own: its field rt; default_ms: the platform's.
local function kept_ms(own, default_ms)
  return own == '0' and ZERO_KEPT_MS or own or default_ms
end

-- Let a stream's inputs expire with it. No caller names their key, so in a slot that moves to another node this may
-- fail, and they keep the life that they have.
local function expire_inputs(m, ms)
  redis.pcall('PEXPIRE', string.sub(m, 1, -2) .. 'i', ms)
end

-- Let a stream that has ended expire. own, inputs: its fields rt and in. Its inputs and placement records go with it;
-- the key of the latter has no name here either. The meta stays for as long as a producer looks for its end: it would
-- create the stream again.
local function expire_ended(m, l, own, inputs, default_ms)
  local ms = kept_ms(own, default_ms)
  redis.call('PEXPIRE', m, math.max(ms, ZERO_KEPT_MS))
  redis.call('PEXPIRE', l, ms)
  redis.pcall('PEXPIRE', string.sub(m, 1, -2) .. 'p', ms)
  if inputs or own then expire_inputs(m, ms) end -- own: also those that a lost meta had go when its plan says
end

-- Append a terminal in place of the producer. The caller has checked that the stream is live. before: a frame and a
-- newline in front of the terminal, or nothing.
local function finish(m, l, id, epoch, last, frame, status, watchers, channel, publish, retention_ms, tenant, us, before)
  local first, seq = string.format('%d', last + 1), string.format('%d', last + (before and 2 or 1))
  frame = (before or '') .. frame
  redis.call('XADD', l, epoch_number(epoch) .. '-' .. seq, 'f', first, 'd', frame)
  redis.call('HSET', m, 's', seq, 'st', status)
  local v = redis.call('HMGET', m, 'mo', 'rt', 'in')
  settle(m, tenant, us, v[1] or '', now_ms())
  expire_ended(m, l, v[2], v[3], retention_ms)
  local message = part(id, epoch, first, seq, frame)
  for gw in string.gmatch(watchers or '', '%S+') do
    redis.call(publish, channel .. gw, message)
  end
end
