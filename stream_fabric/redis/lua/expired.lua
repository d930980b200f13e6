-- KEYS: leases. Returns the replicas whose lease ran out.
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. now_ms())
