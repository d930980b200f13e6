-- Claim a recovery for a while. KEYS: the claim. ARGV: ttl ms, nonce of the call. Returns 1, or 0 while another call
-- has it; a call that is sent again has it still.
local held = redis.call('GET', KEYS[1])
if held and redis.call('PTTL', KEYS[1]) <= tonumber(ARGV[1]) then -- it is longer once the clock has gone back
  return held == ARGV[2] and 1 or 0
end
redis.call('DEL', KEYS[1]) -- frees memory first: Redis at its memory limit runs the writes after it
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
return 1
