-- Keep the request of a response, until its stream has ended. KEYS: the response.
-- ARGV: response, tenant, tag of the tenant, request, bytes, conversation ('' none), ms that it is kept after its end,
--   ms that it waits for the database, ms that it lives while its stream runs, first look in ms, most bytes of the
--   tenant.
-- Returns {0} begun, {1} the tenant has too many bytes, {2, response} this response of the conversation runs.
local id, tag, conversation, live_ms, now = ARGV[1], ARGV[3], ARGV[6], tonumber(ARGV[9]), now_ms()
if redis.call('EXISTS', KEYS[1]) == 1 then return {0} end
if conversation ~= '' then
  local runs = redis.call('GET', R .. 'c:' .. conversation)
  if runs then return {2, runs} end
end
if redis.call('EXISTS', R .. 'f:' .. tag) == 1 then return {1} end
if not make_room(tag, ARGV[5], tonumber(ARGV[11]), now) then return {1} end
redis.call('HSET', KEYS[1], 't', ARGV[2], 'g', tag, 'q', ARGV[4], 'n', ARGV[5], 'kp', ARGV[7], 'dm', ARGV[8],
  'at', whole(now))
redis.call('PEXPIRE', KEYS[1], live_ms)
if conversation ~= '' then
  redis.call('HSET', KEYS[1], 'c', conversation)
  redis.call('SET', R .. 'c:' .. conversation, id, 'PX', live_ms)
end
hold(tag, id, ARGV[5], now, live_ms)
look_at(LIVE, id, now + ARGV[10], live_ms)
return {0}
