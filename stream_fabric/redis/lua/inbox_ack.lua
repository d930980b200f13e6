-- Acknowledge entries of an agent's inbox. KEYS: the pool's prefix. ARGV: replica; then of each: entry id, stream.
local key = P .. ARGV[1] .. ':'
for i = 2, #ARGV, 2 do
  redis.call('XDEL', key .. 'inbox', ARGV[i])
  redis.call('SREM', key .. 'unread', ARGV[i + 1])
end
return 1
