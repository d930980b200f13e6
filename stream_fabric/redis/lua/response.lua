-- Prefix of the scripts of stored responses. KEYS[1]: a key of the shard of their tenant, 'sg:{rsp<k>}:…'.
-- Other keys: 'r:<response>' hash: t tenant, q request, p response, at when it was begun, ca when its stream was found
--   ended, kp ms that it is kept after that, dm ms that it waits for the database ('0': it is not written there),
--   c conversation, n bytes, g tag of the tenant, sv 1 written to the database, dl 1 deleted but maybe written.
--   'live', 'unsaved' sorted sets of responses by when they are looked at next: until their stream has ended, until the
--   database has them. Of a tenant: 'x:<tag>' sorted set of its responses by when they expire here, 'b:<tag>' hash of
--   their bytes and, under '', the sum; 'f:<tag>' exists while the database holds too much of it.
--   'c:<tag of the tenant>:<conversation>' the response that runs in it.
local R = string.match(KEYS[1], '^sg:{[^}]*}:')
local LIVE, UNSAVED = R .. 'live', R .. 'unsaved'

local function whole(n)
  return string.format('%d', n)
end

-- Let a key live so long at least, in ms.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, whole(ms)) end
end

local function look_at(queue, id, at_ms, ttl_ms)
  redis.call('ZADD', queue, whole(at_ms), id)
  keep(queue, ttl_ms)
end

-- Count a response no longer for its tenant.
local function release(tag, id)
  local b = R .. 'b:' .. tag
  local n = redis.call('HGET', b, id)
  if n then
    redis.call('HDEL', b, id)
    redis.call('HINCRBY', b, '', '-' .. n)
  end
  redis.call('ZREM', R .. 'x:' .. tag, id)
end

-- Count a response for its tenant until it expires.
local function hold(tag, id, bytes, now, ms)
  release(tag, id)
  local x, b = R .. 'x:' .. tag, R .. 'b:' .. tag
  redis.call('HSET', b, id, whole(bytes))
  redis.call('HINCRBY', b, '', whole(bytes))
  redis.call('ZADD', x, whole(now + ms), id)
  keep(x, ms)
  keep(b, ms)
end

-- Bytes of a tenant, without what has expired.
local function held_bytes(tag, now)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', R .. 'x:' .. tag, '-inf', now, 'LIMIT', 0, SCANNED_MAX)) do
    release(tag, id)
  end
  return tonumber(redis.call('HGET', R .. 'b:' .. tag, '') or 0)
end

-- Make room for a tenant's new response: what the database has goes first. Returns whether there is room.
local function make_room(tag, bytes, most, now)
  local left = held_bytes(tag, now) + bytes - most
  if left <= 0 then return true end
  for _, id in ipairs(redis.call('ZRANGE', R .. 'x:' .. tag, 0, SCANNED_MAX - 1)) do
    local v = redis.call('HMGET', R .. 'r:' .. id, 'sv', 'n')
    if v[1] then
      redis.call('DEL', R .. 'r:' .. id)
      release(tag, id)
      left = left - v[2]
      if left <= 0 then return true end
    end
  end
  return false
end

-- Let the next response of a conversation begin.
local function unlock(conversation, id)
  if conversation and redis.call('GET', R .. 'c:' .. conversation) == id then
    redis.call('DEL', R .. 'c:' .. conversation)
  end
end
