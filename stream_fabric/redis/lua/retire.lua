-- Forget a replica whose streams have been fenced, unless its agent came back meanwhile.
-- KEYS: leases, info, in flight, inbox. ARGV: replica, 1 when the agent itself leaves.
local expiry = redis.call('ZSCORE', KEYS[1], ARGV[1])
if ARGV[2] ~= '1' and expiry and tonumber(expiry) > now_ms() then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
return 1
