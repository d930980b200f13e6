-- Own an event stream as its only consumer, and commit the consumer's position. Without ownership nothing changes.
-- KEYS: owner (a string that expires), state (hash: next, claim), stream. ARGV: consumer, ttl ms; then, to write: next
-- offset, claim ('' none). What is below the next offset is forgotten, but not while it is claimed.
-- Returns {1, next, claim} ('' and '' of a new stream), or {0, the owner's name} when it is another's.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return {0, owner} end
-- A former owner must not write, even while the stream has no owner
if ARGV[3] and not owner then return {0, ''} end
redis.call('DEL', KEYS[1]) -- frees memory first: Redis at its memory limit runs the writes after it
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if ARGV[3] then
  redis.call('HSET', KEYS[2], 'next', ARGV[3], 'claim', ARGV[4])
  redis.call('XTRIM', KEYS[3], 'MINID', '=', ARGV[3] .. '-0')
end
local state = redis.call('HMGET', KEYS[2], 'next', 'claim')
return {1, state[1] or '', state[2] or ''}
