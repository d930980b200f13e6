-- Write a pool's plan as the leader. KEYS: leader "id term", plans. ARGV: id, term, pool, plan ('' removes it).
-- Returns 1, or 0 when this controller no longer leads in that term.
if redis.call('GET', KEYS[1]) ~= ARGV[1] .. ' ' .. ARGV[2] then return 0 end
redis.call('HDEL', KEYS[2], ARGV[3]) -- frees memory first: Redis at its memory limit runs the writes after it
if ARGV[4] ~= '' then redis.call('HSET', KEYS[2], ARGV[3], ARGV[4]) end
return 1
