-- The one consumer of an event stream: own it, and write down how far it has come. Who does not own it changes nothing.
-- KEYS: owner (a string that expires), state (hash: next, claim), stream. ARGV: consumer, ttl ms; then, to write: next
-- offset, claim ('' none). What is below the next offset is forgotten, but not while it is claimed.
-- Returns {1, next, claim} ('' and '' of a new stream), or {0, the owner's name} when it is another's.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return {0, owner} end
-- One that was owner and is no more may not write, even if nobody has come after it
if ARGV[3] and not owner then return {0, ''} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if ARGV[3] then
  redis.call('HSET', KEYS[2], 'next', ARGV[3], 'claim', ARGV[4])
  redis.call('XTRIM', KEYS[3], 'MINID', '=', ARGV[3] .. '-0')
end
local state = redis.call('HMGET', KEYS[2], 'next', 'claim')
return {1, state[1] or '', state[2] or ''}
