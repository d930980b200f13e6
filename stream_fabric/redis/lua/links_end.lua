-- End the links to a stream. KEYS: its generation. ARGV: ms that the generation is kept.
-- A generation is a time: after one has expired, its number never comes again, and a token of it stays ended.
local last = tonumber(redis.call('GET', KEYS[1]) or 0)
redis.call('SET', KEYS[1], string.format('%.0f', math.max(last + 1, now_ms())), 'PX', ARGV[1])
return 1
