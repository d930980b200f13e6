-- Raise what a budget's counter says was used. KEYS: the prefix's 'held'.
-- ARGV: budget, tokens, micro-units, expiry as Unix time in ms (0: after it was idle).
local c = claim_of({ARGV[1], '', '', ARGV[4], '0'}, 1)
read_counters({c})
c.use.t, c.use.m = math.max(c.use.t, tonumber(ARGV[2])), math.max(c.use.m, tonumber(ARGV[3]))
write_counter(c)
keep_counter(c, now_ms())
return 1
