-- batch: everything that is pending in one worker, in order, as one step.
--
-- ARGV   1 msgpack {at_ms|false, holder, lease_ttl_ms, orphan_grace_ms, keep_ms, reclaim_most, pools, ops,
--                 reply_ms}
--          at_ms is the time instead of the server's own; only tests set it
--          keep_ms is how long keys live without any call
-- reply  msgpack {now_ms, orphaned, freed, forgotten, {reply of each op}, taken_back,
--                 when time next lets one of those go who wait where this call looked, or false}

local batch = unpack_value(ARGV[1])
if batch[1] then
  now = batch[1]
else
  local time = call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
end
holder, lease_ttl_ms, orphan_grace_ms, pools = batch[2], batch[3], batch[4], batch[7]
me = { holder, lease_ttl_ms, orphan_grace_ms, batch[9] }
keep_ms = batch[5]
local ops = batch[8]

-- What most operations look at is read in two calls: their leases, then the scopes of all of them.
local function read_all(key, names, receive)
  for first = 1, #names, AT_ONCE do
    local last = min(first + AT_ONCE - 1, #names)
    local stored = call('HMGET', key, unpack(names, first, last))
    for position = first, last do receive(names[position], stored[position - first + 1]) end
  end
end

local NAMES_LEASE = { q = true, e = true, b = true, a = true, o = true }  -- op[2] is a lease id
local names, fields, wanted = {}, { 'C' }, { C = true }
local function want(field)
  if not wanted[field] then
    wanted[field] = true
    fields[#fields + 1] = field
  end
end
local function want_lease(lease_id) names[#names + 1] = lease_id end
for position = 1, #ops do
  local op = ops[position]
  local verb = op[1]
  if NAMES_LEASE[verb] then names[#names + 1] = op[2] end
  if wants[verb] then wants[verb](op, want, want_lease) end
end
read_all(LEASES, names, function(lease_id, stored)
  local lease = stored and unpack_value(stored) or false
  leases[lease_id] = lease
  if lease then
    want(lease[2])
    want(lease[3])
    want(lease[4])
  end
end)
read_all(SCOPES, fields, keep)
read_index()

local orphaned, freed, forgotten, taken_back = reclaim(batch[6])
local replies = {}
for position = 1, #ops do
  local op = ops[position]
  replies[position] = verbs[op[1]](op)
end

local function write(key, set, sets, delete, deletes)
  if sets[1] == nil and deletes[1] == nil then return end
  for first = 1, #sets, AT_ONCE do
    call(set, key, unpack(sets, first, min(first + AT_ONCE - 1, #sets)))
  end
  for first = 1, #deletes, AT_ONCE do
    call(delete, key, unpack(deletes, first, min(first + AT_ONCE - 1, #deletes)))
  end
  extend(key)
end

local sets, deletes = {}, {}
for field in pairs(dirty) do
  local scope = scopes[field]
  if is_idle(field, scope) then
    deletes[#deletes + 1] = field
  else
    sets[#sets + 1] = field
    sets[#sets + 1] = pack(scope)
  end
end
write(SCOPES, 'HSET', sets, 'HDEL', deletes)

deletes = {}
for lease_id in pairs(gone) do deletes[#deletes + 1] = lease_id end
write(LEASES, 'HSET', lease_sets, 'HDEL', deletes)
write(DUES, 'ZADD', due_sets, 'ZREM', deletes)

local wake = false
for name in pairs(lines_changed) do
  local line = lines[name]
  if line and line.wake and (not wake or line.wake < wake) then wake = line.wake end
end
sets, deletes = waits_written()
write(WAITS, 'HSET', sets, 'HDEL', deletes)
if sets[1] then extend(EXPIRIES) end

-- A ring that is not heard, or not allowed, costs its holder one look.
for name in pairs(news_changed) do
  if news[name][1] then redis.pcall('PUBLISH', WAITS .. ':' .. name, '') end
end

return pack({ now, orphaned, freed, forgotten, replies, taken_back, wake })
