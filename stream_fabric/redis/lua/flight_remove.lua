-- Take streams off a replica's list: they have ended, or another replica has them. KEYS: the pool's prefix. ARGV:
-- replica, streams.
for i = 2, #ARGV do
  redis.call('HDEL', P .. ARGV[1] .. ':flight', ARGV[i])
  local at = redis.call('HGET', P .. 'at', ARGV[i])
  if not at or at == ARGV[1] then
    redis.call('HDEL', P .. 'at', ARGV[i])
    drop_work({ARGV[i]})
  end
end
return 1
