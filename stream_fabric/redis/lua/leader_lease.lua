-- Lead the controllers, or go on leading, or leave. KEYS: leader "id term", terms so far. ARGV: id, ttl ms; 0: leave.
-- Returns the term that this one leads in; 0: another leads, or nobody does any more.
local id, term = string.match(redis.call('GET', KEYS[1]) or '', '^(%S+) (%d+)$')
if ARGV[2] == '0' then
  if id == ARGV[1] then redis.call('DEL', KEYS[1]) end
  return 0
end
if not id then
  term = string.format('%d', redis.call('INCR', KEYS[2]))
elseif id ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. term, 'PX', ARGV[2])
return tonumber(term)
