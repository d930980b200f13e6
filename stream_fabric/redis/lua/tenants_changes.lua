-- Records of tenants and plans after a revision, the oldest first. Reads only.
-- KEYS: records by name, revisions by name. ARGV: the revision, how many records at most.
-- All records of one revision come together, also when they are more.
-- Returns {highest revision of them, name and record of each}.
local most = tonumber(ARGV[2])
local found = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, most + 1)
if #found > 2 * most then
  local last = found[#found] -- the record after the page; its revision is left out, unless the page has no other
  if found[2] == last then
    found = redis.call('ZRANGEBYSCORE', KEYS[2], last, last, 'WITHSCORES')
  else
    while found[#found] == last do
      found[#found], found[#found - 1] = nil, nil
    end
  end
end
local records = {}
for i = 1, #found, 2 do
  records[i], records[i + 1] = found[i], redis.call('HGET', KEYS[1], found[i]) or ''
end
return {found[#found] or ARGV[1], records}
