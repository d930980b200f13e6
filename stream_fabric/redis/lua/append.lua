-- Many streams of one slot in one call. KEYS: meta and log of each.
-- ARGV: channel prefix, publish command, 1 when a publish's receivers are counted exactly, replica, live ttl ms,
--   retention ms; then of each stream: id, epoch, first, last, frames, usage, structure, status ('' while it lives),
--   number of inputs that these frames and those before answer ('' as before), 1 if these frames end the answer only
--   while no other input waits.
-- Returns {code, seq, note, inputs, …}: 0 ok, 1 duplicate, 2 gap after seq, 3 fenced, 4 cancelled at seq, 5 closed,
--   6 no stream, 7 not ended because inputs wait, 8 steered at seq. note: '' or, of a stream that lives on and that
--   nobody watched before this append, 'L<for ms>' or 'V<for ms>', as uw says; 'A<tenant>' of one that has ended now
--   and that its tenant's account must settle. inputs: their number.
local channel, publish, counted, replica = ARGV[1], ARGV[2], ARGV[3] == '1', ARGV[4]
local now = now_ms()
local replies, parts, metas = {}, {}, {}
for i = 1, #KEYS / 2 do
  local m, l, a = KEYS[2 * i - 1], KEYS[2 * i], 6 + (i - 1) * 10
  local epoch, first, last = ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
  local v = redis.call('HMGET', m, 'e', 's', 'st', 'w', 'x', 'cx', 't', 'r', 'uw', 'mo', 'ac', 'in', 'rt')
  local code, seq, note = 0, tonumber(v[2] or 0), ''
  if not v[1] then
    code = 6
  elseif v[1] ~= epoch or (v[8] ~= '' and v[8] ~= replica) then
    code = 3 -- also of two replicas that a pool's failover gave the same epoch: one has begun it
  elseif v[3] == 'cancelled' then
    code, seq = 4, tonumber(v[6])
  elseif v[3] == 'incomplete' and v[6] then
    code, seq = 8, tonumber(v[6])
  elseif tonumber(last) <= seq then
    code = 1
  elseif v[3] ~= 'live' then
    code = 5
  elseif tonumber(first) ~= seq + 1 then
    code = 2
  elseif ARGV[a + 10] == '1' and (v[12] or '0') ~= ARGV[a + 9] then
    code = 7
  else
    local frames, structure, status = ARGV[a + 5], ARGV[a + 7], ARGV[a + 8]
    redis.call('XADD', l, epoch_number(epoch) .. '-' .. last, 'f', first, 'd', frames)
    local fields = {'s', last, 'us', ARGV[a + 6]}
    local begins, renews = seq == 0, now - v[5] > EXPIRY_EVERY_MS
    if status ~= '' then
      fields[5], fields[6] = 'st', status
      if status == 'cancelled' then fields[7], fields[8] = 'cx', string.format('%d', last - 1) end
    elseif renews then
      fields[5], fields[6], fields[7], fields[8] = 'x', now, 'r', replica
    elseif begins then
      fields[5], fields[6] = 'r', replica
    end
    if structure ~= '' then
      local before = seq == 0 and '' or redis.call('HGET', m, 'o')
      fields[#fields + 1], fields[#fields + 2] = 'o', before .. structure
    end
    if ARGV[a + 9] ~= '' then fields[#fields + 1], fields[#fields + 2] = 'ia', ARGV[a + 9] end
    redis.call('HSET', m, unpack(fields))
    if status ~= '' then
      settle(m, v[7], ARGV[a + 6], v[10] or '', now)
      expire_ended(m, l, v[13], v[12], ARGV[6])
      if v[11] then note = 'A' .. v[7] end
    elseif renews or begins then
      if renews then redis.call('PEXPIRE', m, ARGV[5]) end -- else the create has set it a moment ago
      redis.call('PEXPIRE', l, ARGV[5])
      if v[12] then expire_inputs(m, ARGV[5]) end
    end
    seq = tonumber(last)
    if v[9] ~= '' and status == '' then
      note = string.format('%s%d', string.sub(v[9], 1, 1), now - string.sub(v[9], 2))
    end
    local message
    for gw in string.gmatch(v[4], '%S+') do
      message = message or part(ARGV[a + 1], epoch, first, last, frames)
      local list = parts[gw]
      if list then
        list[#list + 1] = message
        metas[gw][#list] = m
      else
        parts[gw] = {message}
        metas[gw] = {m}
      end
    end
  end
  local at = 4 * i - 3
  replies[at], replies[at + 1], replies[at + 2], replies[at + 3] = code, seq, note, tonumber(v[12] or 0)
end
for gw, list in pairs(parts) do
  local heard = redis.call(publish, channel .. gw, table.concat(list, RECORD))
  if counted and heard == 0 then
    -- The gateway is gone, or between two connections and will watch again
    for _, m in ipairs(metas[gw]) do
      local left = without(redis.call('HGET', m, 'w'), gw)
      redis.call('HSET', m, 'w', left)
      if left == '' then redis.call('HSET', m, 'uw', 'V' .. now) end
    end
  end
end
return replies
