-- Publish which blocks a replica's cache gained and lost.
-- KEYS: the pool's block changes. ARGV: replica, change, kept ms.
redis.call('XADD', KEYS[1], 'MINID', '~', string.format('%d', now_ms() - ARGV[3]), '*', 'r', ARGV[1], 'c', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
