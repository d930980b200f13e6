-- Unbind an idempotency key or a chat. KEYS: the key. ARGV: the stream it must be bound to.
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 1, #ARGV[1] + 1) == ARGV[1] .. ' ' then redis.call('DEL', KEYS[1]) end
return 1
