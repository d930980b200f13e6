-- Request a state of a replica; its agent gets it with its next report. A draining replica keeps draining.
-- KEYS: requested states, requesters. ARGV: replica, state, requester. Returns 1, or 0 when nothing changes.
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held == 'draining' or held == ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
return 1
