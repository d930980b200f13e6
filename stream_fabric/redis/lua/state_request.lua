-- What an agent hears at its next report. Who was told to drain is told nothing else any more.
-- KEYS: what is asked of each replica, who asks. ARGV: replica, state, who. Returns 1, or 0 when it stays as it is.
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held == 'draining' or held == ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
return 1
