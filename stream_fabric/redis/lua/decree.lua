-- Write what is wanted of a pool, while leading. KEYS: leader "id term", plans. ARGV: id, term, pool, plan; '': none.
-- Returns 1, or 0 to who does not lead in that term any more.
if redis.call('GET', KEYS[1]) ~= ARGV[1] .. ' ' .. ARGV[2] then return 0 end
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[2], ARGV[3])
else
  redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
end
return 1
