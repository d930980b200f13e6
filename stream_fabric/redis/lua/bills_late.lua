-- Read the streams of a partition whose bill is late. No other call reads them for as long.
-- KEYS: unbilled streams by the moment of their end, ms; claim. ARGV: ms after which a bill is late, streams at most.
-- Returns {stream, moment, …}.
local late = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms() - ARGV[1], 'WITHSCORES', 'LIMIT', 0, ARGV[2])
if #late > 0 and not redis.call('SET', KEYS[2], '', 'NX', 'PX', ARGV[1]) then return {} end
return late
