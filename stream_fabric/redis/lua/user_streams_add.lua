-- Put a stream on its user's list, the newest of which are kept. In one step: a list without an expiry stays for ever.
-- KEYS: the list. ARGV: when it was created, stream, streams at most, ttl s.
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -ARGV[3] - 1)
redis.call('EXPIRE', KEYS[1], ARGV[4])
return 1
