-- Choose the least loaded live replica with room and hand it the request, atomically.
-- KEYS: leases, then of each candidate: info, in flight, inbox. ARGV: stream id, work, candidates' ids.
-- Returns {0, replica, in flight, slots}, {1} when all are full, {2} when none lives.
local now, id = now_ms(), ARGV[1]
local best, best_load, best_count, best_slots
local alive = false
for i = 1, (#KEYS - 1) / 3 do
  local replica = ARGV[2 + i]
  local expiry = redis.call('ZSCORE', KEYS[1], replica)
  if redis.call('HEXISTS', KEYS[3 * i], id) == 1 then return {0, replica, 0, 0} end
  if expiry and tonumber(expiry) > now then
    local v = redis.call('HMGET', KEYS[3 * i - 1], 'state', 'slots', 'room')
    if v[1] == 'ready' then
      alive = true
      local count, slots = redis.call('HLEN', KEYS[3 * i]), tonumber(v[2])
      if count < tonumber(v[3]) and (not best or count / slots < best_load) then
        best, best_load, best_count, best_slots = i, count / slots, count, slots
      end
    end
  end
end
if not best then return {alive and 1 or 2} end
redis.call('HSET', KEYS[3 * best], id, now)
redis.call('XADD', KEYS[3 * best + 1], '*', 's', id, 'w', ARGV[2])
return {0, ARGV[2 + best], best_count + 1, best_slots}
