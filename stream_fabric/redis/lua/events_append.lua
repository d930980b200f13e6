-- Put events into the stream that holds them until a consumer has taken them. An entry's id is <n>-0: n only grows,
-- with the clock (ms * 1024) where it has come further, so that after a loss of everything it goes on above what was
-- read.
-- KEYS: stream, head "n bytes", mark "number refused|earlier" of the writer's last batch. ARGV: batch number, mark ttl
-- ms, bytes at most, bytes at most with what must not be dropped; then of each event: 1 when it must not be dropped,
-- and its record.
-- Returns {the positions (from 0) of those refused, each followed by a space; earlier: the writer's batch before this
-- one, '' none}. A batch sent again is answered as before, unless all of it was refused: there may be room now.
local OVERHEAD = 64
local number, refused, earlier = string.match(redis.call('GET', KEYS[3]) or '', '^(%d+) ([%d ]*)|?(%d*)$')
if number == ARGV[1] then return {refused, earlier} end
local n, total = string.match(redis.call('GET', KEYS[2]) or '0 0', '^(%d+) (%d+)$')
n, total = tonumber(n), tonumber(total)
-- Each entry tells how many bytes had come up to it, so what is held is known from the first alone
local held, first = 0, redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
if first then held = total - tonumber(first[2][4]) + #first[2][2] + OVERHEAD end
n = math.max(n, now_ms() * 1024)
refused = ''
local before = n
for i = 5, #ARGV, 2 do
  local record = ARGV[i + 1]
  local size = #record + OVERHEAD
  if held + size > tonumber(ARGV[ARGV[i] == '1' and 4 or 3]) then
    refused = refused .. (i - 5) / 2 .. ' '
  else
    n, held, total = n + 1, held + size, total + size
    redis.call('XADD', KEYS[1], string.format('%d-0', n), 'e', record, 'b', string.format('%d', total))
  end
end
if n > before then
  redis.call('SET', KEYS[2], string.format('%d %d', n, total))
  redis.call('SET', KEYS[3], ARGV[1] .. ' ' .. refused .. '|' .. (number or ''), 'PX', ARGV[2])
end
return {refused, number or ''}
