-- Delete a response. KEYS: the response. ARGV: response, tenant, ms in which a process may still write it to the
-- database (0: its stream was not created, so none does).
-- Returns 1, or 0: the tenant has no such response here.
local id, ms = ARGV[1], tonumber(ARGV[3])
local v = redis.call('HMGET', KEYS[1], 't', 'g', 'dl', 'c', 'dm', 'ca')
if v[1] ~= ARGV[2] or v[3] then return 0 end
redis.call('DEL', KEYS[1])
release(v[2], id)
redis.call('ZREM', LIVE, id)
redis.call('ZREM', UNSAVED, id)
unlock(v[4], id)
if ms > 0 and v[5] ~= '0' and v[6] then
  local now = now_ms()
  redis.call('HSET', KEYS[1], 't', v[1], 'g', v[2], 'dl', '1', 'at', whole(now), 'kp', '0')
  redis.call('PEXPIRE', KEYS[1], ms)
  look_at(UNSAVED, id, now, ms)
end
return 1
