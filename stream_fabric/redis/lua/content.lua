-- Delete the content of an ended stream. What a producer and the account still need stays for a while: epoch, last seq,
-- status and usage. A bill that is not written yet needs its terms: they stay as long.
-- ...: keys of the stream's log, inputs and placement records.
local function delete_content(m, ...)
  local partition, id = string.match(m, '^(sg:{[^}]*}:)(.*):m$')
  local terms = ''
  -- No caller names the key, so in a slot that moves to another node this may fail: then the terms stay, too
  if redis.pcall('ZSCORE', partition .. 'unbilled', id) then
    local read, meta = pcall(cjson.decode, redis.call('HGET', m, 'f'))
    if read and type(meta) == 'table' and type(meta.facts) == 'table' then
      terms = cjson.encode({facts = {model = meta.facts.model, kind = meta.facts.kind}, bill = meta.bill})
    end
  end
  redis.call('HSET', m, 'fg', '1', 'f', terms, 'o', '', 'w', '')
  redis.call('DEL', ...)
  redis.call('PEXPIRE', m, ZERO_KEPT_MS)
end
