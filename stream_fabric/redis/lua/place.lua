-- Hand a request to the best candidate with room, or queue it, or refuse it.
-- KEYS: the pool's prefix. ARGV: stream, work, tenant, tier, model, session, prompt tokens, output tokens, wait ms,
--   jitter, queue at most, pin ms, replica that loses it or '', bound, spill at, decode weight, repeat weight, overload
--   terms (packed: reject mark, overflow mark, overflow in, replicas, flags: 1 returned, 2 moved here, 4 batch
--   yields, 8 at once or not at all, 16 a retry, prefill duty at most, replicas on their way; '' none), span, under
--   share, miss, bytes of the pool's requests at most, of the tenant's at most, replicas that produced it before (each
--   between two \28), regions that it is bound to (each after a \27, and one \27 at the end; '' any), its tenant's
--   share; then of each candidate: replica, matched tokens.
-- Returns {0, replica, reason, scored, expected ms to the first token} placed (without the last if it was before),
--   {1, position, '', scored} queued, {2, retry after s, '', scored} refused because the queue is full,
--   {3, retry after s, backlog s, scored} because the backlog is too long for its tier,
--   {4, 0, backlog s, scored} sent to an adjacent pool, {5, 0, share of slots, scored} overflow from another pool
--   without room here, {6 or 7, retry after s, bytes, scored} because requests of the pool or of the tenant take too
--   much memory, {8, 0, '', scored} because it would have to wait; scored: of each candidate packed score ms,
--   matched, in flight, load ms, barred (0 no, 1 dead, 2 full,
--   3 over, 4 no room in its KV cache).
local id, payload, tenant, tier, model, session = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6]
local prompt, output, jitter = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[10])
local pin_ms, instead = ARGV[12], ARGV[13]
local BOUND, SPILL_AT, DECODE_WEIGHT = tonumber(ARGV[14]), tonumber(ARGV[15]), tonumber(ARGV[16])
local REPEAT_WEIGHT = tonumber(ARGV[17])
local terms, SPAN, UNDER_SHARE, MISS = ARGV[18], tonumber(ARGV[19]), tonumber(ARGV[20]), tonumber(ARGV[21])
local pool_bytes_max, tenant_bytes_max = tonumber(ARGV[22]), tonumber(ARGV[23])
local tried, regions, share = ARGV[24], ARGV[25], tonumber(ARGV[26])
local FIRST = 27
local at_us = now_us()
local now = math.floor(at_us / 1000)

local held = redis.call('HGET', P .. 'at', id)
if held == '' then return {1, position(id), '', ''} end
if held then
  if held ~= instead then return {0, held, 'only', ''} end
end

local function count_rejected()
  redis.call('HINCRBY', P .. 'stat', 'shed' .. tier, 1)
  redis.call('HSET', P .. 'stat', 'refused', now)
end

local function spread_retry(after_s, draw) -- as ``overload.spread_retry_s``
  return math.max(1, math.ceil(math.min(after_s, RETRY_S_MAX / RETRY_SPREAD) * (1 + draw * (RETRY_SPREAD - 1))))
end

local count = (#ARGV - FIRST + 1) / 2
local names = {}
for i = 1, count do names[i] = ARGV[FIRST + 2 * i - 2] end
local pin = session ~= '' and redis.call('GET', P .. 'pin:' .. session)
local board = count > 0 and redis.call('HMGET', P .. 'board', unpack(names)) or {}
local slots, room, flight, prefill, decode, prefill_s, decode_s, load, waits = {}, {}, {}, {}, {}, {}, {}, {}, {}
local alive, prefill_ms = 0, 0
for i = 1, count do
  if board[i] then
    local expires, ready
    expires, ready, slots[i], room[i], flight[i], prefill[i], decode[i], prefill_s[i], decode_s[i] =
      struct.unpack(SEAT, board[i])
    if ready == 1 and expires > now then
      alive = alive + 1
      load[i] = prefill[i] + decode[i]
      prefill_ms = prefill_ms + prefill[i]
    end
  end
end
local function wait_ms(i, streams) -- as ``ReplicaSlot.wait_ms``
  return streams < slots[i] and prefill[i] or prefill[i] + decode[i] * (streams - slots[i] + 1) / flight[i]
end
local function wait_after_yield_ms(i) return wait_ms(i, flight[i] - yieldable_in(board[i])) end
local mean_ms = 0
for i = 1, count do
  if load[i] then mean_ms = mean_ms + load[i] / alive end
end

local hits, most, copies = {}, 0, 0
for i = 1, count do
  hits[i] = load[i] and math.min(tonumber(ARGV[FIRST + 2 * i - 1]), prompt) or 0
  most = math.max(most, hits[i])
end
for i = 1, count do
  if 2 * hits[i] >= most then copies = copies + 1 end
end
local weight = most > 0 and REPEAT_WEIGHT / copies or 0

local scored, scores = {}, {} -- scores: only of candidates with room
local best, pinned, only, best_ms, only_ms = 0, 0, 0, 0, 0
local start = math.floor(jitter * count)
for i = 1, count do
  if not load[i] then
    scored[i] = struct.pack('<dI4I4dB', -1, 0, 0, 0, 1)
  else
    local hit = hits[i]
    waits[i] = wait_ms(i, flight[i])
    if flight[i] >= room[i] then
      scored[i] = struct.pack('<dI4I4dB', -1, hit, flight[i], load[i], 2)
    elseif not has_kv_for(kv_in(board[i]), flight[i], prefill[i], decode[i], prefill_s[i], decode_s[i], prompt - hit,
        output) then
      scored[i] = struct.pack('<dI4I4dB', -1, hit, flight[i], load[i], 4)
    else
      local used = flight[i] / room[i]
      local stays = used <= SPILL_AT or jitter < (1 - used) / (1 - SPILL_AT)
      local own_ms = prompt / prefill_s[i] * 1000 + output / decode_s[i] * 1000
      local kept = stays and hit or 0
      local score = waits[i] + (prompt - kept) / prefill_s[i] * 1000 + weight * (most - kept) / prefill_s[i] * 1000
        + decode[i] * DECODE_WEIGHT
      local over = load[i] > BOUND * mean_ms + own_ms + weight * kept / prefill_s[i] * 1000
      scored[i] = struct.pack('<dI4I4dB', score, hit, flight[i], load[i], over and 3 or 0)
      scores[i] = score
      local turn = (i - 1 - start) % count
      if only == 0 or score < only_ms or (score == only_ms and turn < (only - 1 - start) % count) then
        only, only_ms = i, score
      end
      if not over then
        if names[i] == pin and stays then pinned = i end
        if best == 0 or score < best_ms or (score == best_ms and turn < (best - 1 - start) % count) then
          best, best_ms = i, score
        end
      end
    end
  end
end
local explained = table.concat(scored)
local taken, reason = best, 'load'
if pinned > 0 then
  taken, reason = pinned, 'pin'
elseif best == 0 then
  taken, reason = only, 'only'
elseif hits[best] < most then
  reason = 'spill'
elseif hits[best] > 0 then
  reason = 'prefix'
end
if tier >= BATCH_TIER and batch_yields(now) then taken = 0 end

local reject_s, overflow_s, overflow_in_max, replicas, flags, duty_max, relief = 0, 0, 0, 0, 0, 0, 0
if terms ~= '' then
  reject_s, overflow_s, overflow_in_max, replicas, flags, duty_max, relief = struct.unpack('<dddIBdd', terms)
end
local again, may_yield, at_once = flags % 4, flags % 8 >= 4 and tier < BATCH_TIER, flags % 16 >= 8
local queues = {P .. 'lanes'}
for t = 0, tier do queues[t + 2] = P .. 'q' .. t end
local waits_here = redis.call('EXISTS', unpack(queues)) > 0 -- one call where nobody waits
local lanes = waits_here and pinned_lanes()
local region_of = {} -- of live candidates, only while pinned requests wait
if lanes and count > 0 then
  for i, served in ipairs(redis.call('HMGET', P .. 'models', unpack(names))) do
    if load[i] then region_of[i] = region_in(served) end
  end
end
local before = {} -- lanes of pinned requests that go before this one
local ahead = 0
for t = 0, waits_here and tier or -1 do ahead = ahead + redis.call('ZCARD', P .. 'q' .. t) end
local unpinned = ahead
local function count_ahead() -- as ``queue.goes_before``
  before, ahead = {}, unpinned
  for _, lane in ipairs(lanes) do
    local goes = lane.tier <= tier
    if goes and taken > 0 then
      goes = admits(lane.regions, region_of[taken])
    elseif goes then
      for _, region in pairs(region_of) do goes = goes and admits(lane.regions, region) end
    end
    if goes then
      before[#before + 1] = lane
      ahead = ahead + redis.call('ZCARD', P .. 'q' .. lane.name)
    end
  end
end
if lanes then count_ahead() end
local draw = jitter * DRAW_SCALE % 1
local late = taken > 0 and ahead == 0 and reject_s > 0 and overflow_in_max == 0 and waits[taken] / 1000 - reject_s or 0
local in_time = 0
for i = 1, count do
  if load[i] and waits[i] <= reject_s * 1000 then in_time = in_time + 1 end
end
local is_short = 2 * in_time < alive -- fewer than half of the replicas would begin it in time
if late > 0 and not is_short and draw * (SPAN - 1) * reject_s < late then
  -- It would be rejected for its wait at the chosen replica: the best of those that begin it in time
  local other = 0
  for i = 1, count do
    if scores[i] and waits[i] <= reject_s * 1000 then
      local turn, before = (i - 1 - start) % count, (other - 1 - start) % count
      if other == 0 or scores[i] < scores[other] or (scores[i] == scores[other] and turn < before) then other = i end
    end
  end
  if other > 0 then
    taken, reason = other, hits[other] < most and 'spill' or hits[other] > 0 and 'prefix' or 'load'
    if lanes then count_ahead() end
  end
end
local admitted_ms = 0 -- prefill that was admitted, as far as it is not forgotten
if duty_max > 0 then
  local sums = redis.call('HMGET', P .. 'stat', 'pa', 'paat')
  admitted_ms = (sums[1] or 0) * math.exp(-math.abs((sums[2] or 0) - now) / DUTY_MS)
end
if instead == '' and overflow_in_max == 0 and again == 0 then
  -- As ``Demand.count``: a retry was counted when it was refused
  local counted = flags >= 16 and math.abs(now - (redis.call('HGET', P .. 'stat', 'refused') or 0)) < RETRIES_MS
  if tier == FREE_TIER or counted then
    redis.call('HINCRBY', P .. 'stat', 'n' .. tier, 1)
  else
    add_to(P .. 'stat', {'n', 'np', 'no', 'n' .. tier}, {1, prompt - (taken > 0 and hits[taken] or most), output, 1})
  end
  if count == 0 then redis.call('PEXPIRE', P .. 'stat', POOL_TTL_MS) end -- no replica renews it
end

if again == 1 then redis.call('HINCRBY', P .. 'stat', 'back', 1) end
if overflow_in_max > 0 then
  local slots_all, flight_all = 0, 0
  for i = 1, count do
    if load[i] then slots_all, flight_all = slots_all + slots[i], flight_all + flight[i] end
  end
  local free = taken > 0 and waiting_count() == 0 and flight_all + 1 <= overflow_in_max * slots_all
  free = free and not (duty_max > 0 and admitted_ms / (DUTY_MS * alive) > duty_max)
  if not (free and prefill_ms / alive / 1000 < reject_s) then
    return {5, 0, string.format('%.17g', slots_all > 0 and flight_all / slots_all or 1), explained}
  end
elseif (reject_s > 0 or overflow_s > 0 or duty_max > 0) and alive == 0 then
  if overflow_s > 0 then -- without adjacent pools the request waits until a replica starts
    redis.call('HINCRBY', P .. 'stat', 'sent', 1)
    return {4, 0, '0', explained}
  end
elseif reject_s > 0 or overflow_s > 0 or duty_max > 0 then
  local least, least_after -- ms until the first replica begins one more request, and if batch work yields to it
  for i = 1, count do
    if load[i] then
      least = math.min(least or waits[i], waits[i])
      if may_yield then
        local after = wait_after_yield_ms(i)
        least_after = math.min(least_after or after, after)
      end
    end
  end
  local backlog = math.max(prefill_ms / alive, least_after or least) / 1000
  local late_s = math.max(prefill_ms / alive, least) / 1000
  local duty = admitted_ms / (DUTY_MS * (alive * math.max(replicas / count, 1)))
  local is_over = duty_max > 0 and duty > duty_max
  local per_s, decode_per_s = 0, 0
  if ahead > 0 or (overflow_s > 0 and (is_over or backlog >= overflow_s)) then
    for i = 1, count do
      if load[i] then per_s, decode_per_s = per_s + prefill_s[i], decode_per_s + decode_s[i] end
    end
  end
  if ahead > 0 then
    local waits_p, waits_o = 0, 0
    for t = 0, tier do
      local tokens = redis.call('HMGET', P .. 'stat', 'qp' .. t, 'qo' .. t)
      waits_p, waits_o = waits_p + (tokens[1] or 0), waits_o + (tokens[2] or 0)
    end
    for _, lane in ipairs(before) do
      local tokens = redis.call('HMGET', P .. 'stat', 'qp' .. lane.name, 'qo' .. lane.name)
      waits_p, waits_o = waits_p + (tokens[1] or 0), waits_o + (tokens[2] or 0)
    end
    local waits_s = waits_p / (per_s / alive) + waits_o / (decode_per_s / alive)
    local queue_s = waits_s / (alive * math.max(replicas / count, 1) + relief)
    backlog, late_s = backlog + queue_s, late_s + queue_s
  end
  local held = is_over and math.max(backlog, overflow_s) or backlog
  local overflows = overflow_s > 0 and held >= overflow_s and most / (per_s / alive) < MISS * held
  if overflows and pin then
    for i = 1, count do
      if names[i] == pin and load[i] then overflows = false end
    end
  end
  local mark = reject_s
  local wait = backlog
  if taken > 0 and ahead == 0 then
    late_s = is_short and waits[taken] / 1000 or 0
    wait = (is_short and may_yield and wait_after_yield_ms(taken) or waits[taken]) / 1000
  end
  if may_yield and (is_over or (mark > 0 and late_s > mark)) then
    redis.call('HSET', P .. 'stat', 'yields', string.format('%d', now + YIELD_MS))
    redis.call('HINCRBY', P .. 'stat', 'yielded', 1)
    local called, called_ms = 0, 0 -- as ``refusals.called_to_yield``
    for i = 1, count do
      if load[i] and (i == taken or taken == 0 or ahead > 0) and yieldable_in(board[i]) > 0 then
        local after = wait_after_yield_ms(i)
        if called == 0 or after < called_ms then called, called_ms = i, after end
      end
    end
    if called > 0 then
      local calls = P .. names[called] .. ':calls'
      redis.call('XADD', calls, 'MAXLEN', 1, '*', 'c', '')
      redis.call('PEXPIRE', calls, YIELD_MS)
    end
  end
  if mark > 0 and wait > mark and not (overflows and overflow_s <= reject_s) then
    local v = redis.call('HMGET', P .. 'stat', 'v' .. tier, 'qp' .. tier, 'qo' .. tier)
    local mine = math.max((redis.call('HGET', P .. 'f' .. tier, tenant) or 0) - (v[1] or 0), 0)
    local all = (v[2] or 0) + (v[3] or 0)
    for _, lane in ipairs(lanes or {}) do
      if lane.tier == tier then
        local tokens = redis.call('HMGET', P .. 'stat', 'qp' .. lane.name, 'qo' .. lane.name)
        all = all + (tokens[1] or 0) + (tokens[2] or 0)
      end
    end
    if mine * redis.call('HLEN', P .. 'f' .. tier) < all then mark = mark * UNDER_SHARE end
    if wait > mark and draw * (SPAN - 1) * mark < wait - mark then
      local retry = spread_retry(wait - mark, draw)
      count_rejected()
      return {3, retry, string.format('%.17g', wait), explained}
    end
  end
  if is_over and not overflows then
    count_rejected()
    local retry = spread_retry(DUTY_MS / 1000 * math.log(duty / duty_max), draw)
    return {3, retry, string.format('%.17g', backlog), explained}
  end
  if overflows then
    redis.call('HINCRBY', P .. 'stat', 'sent', 1)
    return {4, 0, string.format('%.17g', backlog), explained}
  end
end
if at_once and (taken == 0 or ahead > 0) then return {8, 0, '', explained} end
local held_bytes -- requests of all tenants and of this one; nil: not read
if instead == '' then
  local over
  over, held_bytes = over_bytes(tenant, #payload, pool_bytes_max, tenant_bytes_max)
  if over > 0 and math.abs(now - (redis.call('HGET', P .. 'stat', 'recounted') or 0)) >= RECOUNT_EVERY_MS then
    redis.call('HSET', P .. 'stat', 'recounted', now)
    recount_bytes()
    over, held_bytes = over_bytes(tenant, #payload, pool_bytes_max, tenant_bytes_max)
  end
  if over > 0 then return {over, 1, string.format('%d', held_bytes[over - 5] or 0), explained} end
elseif held then -- a refused one stays on its replica's list
  redis.call('HDEL', P .. 'at', id)
  redis.call('HDEL', P .. held .. ':flight', id)
end
if duty_max > 0 and alive > 0 then -- one that is queued counts as on the mean replica
  local speed = taken > 0 and prefill_s[taken] or 0
  if taken == 0 then
    for i = 1, count do
      if load[i] then speed = speed + prefill_s[i] / alive end
    end
  end
  local own_ms = (prompt - (taken > 0 and hits[taken] or most)) / speed * 1000
  redis.call('HSET', P .. 'stat', 'pa', string.format('%.17g', admitted_ms + own_ms), 'paat', now)
end
if taken > 0 and ahead == 0 then
  keep_work(id, payload, tenant, held_bytes)
  hand(id, payload, names[taken], board[taken], (prompt - hits[taken]) / prefill_s[taken] * 1000,
    output / decode_s[taken] * 1000, session, pin_ms, at_us)
  local expected_ms = waits[taken] + (prompt - hits[taken]) / prefill_s[taken] * 1000
  return {0, names[taken], reason, explained, string.format('%.17g', expected_ms)}
end
local waiting, queue_max = waiting_count(), tonumber(ARGV[11])
local is_full = waiting >= queue_max or (regions ~= '' and pinned_count(lanes) >= queue_max * PINNED_QUEUE_SHARE)
if instead == '' and is_full then
  local rate = tonumber(redis.call('HGET', P .. 'stat', 'rate') or 0)
  drop_work({id})
  redis.call('HSET', P .. 'stat', 'refused', now)
  return {2, rate <= 0 and 1 or math.max(1, math.min(RETRY_S_MAX, math.ceil((waiting + 1) / rate))), '', explained}
end
keep_work(id, payload, tenant, held_bytes)
local begins = 0 -- before all others: somebody is in the middle of reading a stream that lost its replica
if instead == '' then
  local virtual = tonumber(redis.call('HGET', P .. 'stat', 'v' .. tier) or 0)
  begins = math.max(virtual, tonumber(redis.call('HGET', P .. 'f' .. tier, tenant) or 0))
  redis.call('HSET', P .. 'f' .. tier, tenant, string.format('%.17g', begins + (prompt + output) * DEFAULT_SHARE / share))
end
count_waiting(tier .. regions, prompt, output)
if regions ~= '' then redis.call('SADD', P .. 'lanes', tier .. regions) end
redis.call('ZADD', P .. 'q' .. tier .. regions, string.format('%.17g', begins), id)
local wait_until = now + tonumber(ARGV[9])
redis.call('ZADD', P .. 'late', wait_until, id)
local believed, most_held = {}, pin and prompt or 0
for i = 1, count do
  local tokens = math.min(tonumber(ARGV[FIRST + 2 * i - 1]), prompt)
  if tokens > 0 then believed[#believed + 1] = '\30' .. names[i] .. '\29' .. string.format('%d', tokens) end
  most_held = math.max(most_held, tokens)
end
redis.call('HSET', P .. 'ask', id, table.concat({model .. regions, string.format('%d', wait_until), string.format('%d', at_us),
  session, string.format('%d', prompt), string.format('%d', output), pin or '', string.format('%d', most_held),
  table.concat(believed) .. tried}, '\31'))
redis.call('HSET', P .. 'at', id, '')
if taken > 0 then pull(names[taken], board[taken], at_us, pin_ms) end
held = redis.call('HGET', P .. 'at', id)
if held ~= '' then return {0, held, reason, explained} end
return {1, position(id), '', explained}
