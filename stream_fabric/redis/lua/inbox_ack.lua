-- Acknowledge entries of an agent's inbox. KEYS: the pool's prefix. ARGV: replica; then of each: entry id, stream.
local key = P .. ARGV[1] .. ':'
for first = 2, #ARGV, 2 * PART do
  local entries, streams = {}, {}
  for i = first, math.min(first + 2 * PART - 1, #ARGV), 2 do
    entries[#entries + 1], streams[#streams + 1] = ARGV[i], ARGV[i + 1]
  end
  redis.call('XDEL', key .. 'inbox', unpack(entries))
  redis.call('SREM', key .. 'unread', unpack(streams))
end
return 1
