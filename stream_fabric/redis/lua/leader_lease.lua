-- Take, renew or give up leadership. KEYS: leader "id term", number of terms. ARGV: id, ttl ms (0: give up).
-- Returns the term that this controller leads in; 0: it does not lead.
local id, term = string.match(redis.call('GET', KEYS[1]) or '', '^(%S+) (%d+)$')
if ARGV[2] == '0' then
  if id == ARGV[1] then redis.call('DEL', KEYS[1]) end
  return 0
end
-- A lease that is left for longer than any is taken was given before the clock went back
if id and id ~= ARGV[1] and redis.call('PTTL', KEYS[1]) <= 2 * ARGV[2] then return 0 end
if id ~= ARGV[1] then id = nil end
redis.call('DEL', KEYS[1]) -- frees memory first: Redis at its memory limit runs the writes after it
if not id then term = string.format('%d', redis.call('INCR', KEYS[2])) end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. term, 'PX', ARGV[2])
return tonumber(term)
