-- Keep a record beside each stream, once. KEYS: meta and records of each. ARGV: ttl ms of a live stream's, ttl ms of
-- an ended one's, records at most; then the record of each.
for i = 1, #KEYS / 2 do
  local key, record = KEYS[2 * i], ARGV[3 + i]
  local v = redis.call('HMGET', KEYS[2 * i - 1], 'st', 'rt', 'fg')
  if not v[3] then -- else the stream was read and is deleted
    local count = redis.call('RPUSH', key, record)
    if count > 1 then
      for _, held in ipairs(redis.call('LRANGE', key, 0, -2)) do
        if held == record then -- sent again after a lost connection
          redis.call('RPOP', key)
          break
        end
      end
      redis.call('LTRIM', key, -ARGV[3], -1)
    end
    -- A short stream may have ended before its record comes: its end has set no expiry here
    redis.call('PEXPIRE', key, v[1] == 'live' and ARGV[1] or kept_ms(v[2], ARGV[2]))
  end
end
return 1
