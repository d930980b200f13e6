-- Keep the request of a running stream again that the pool has lost. KEYS: the pool's prefix. ARGV: replica, stream,
-- request, tenant.
local replica, id = ARGV[1], ARGV[2]
if redis.call('HGET', P .. 'at', id) == replica and redis.call('HEXISTS', P .. 'work', id) == 0 then
  keep_work(id, ARGV[3], ARGV[4])
end
return 1
