-- What all verbs share: the keys, the clock, the arithmetic of the domain, and the balances of one batch.
--
-- The verbs are files of their own; the adapter joins prelude, verbs and batch.lua into one script, because
-- everything that is pending in a worker goes out as one call. The answers are those of the domain model
-- (extproc/domain/books.py): all numbers are integers below 2^53, and every division says how it rounds.
--
-- KEYS, all with one hash tag per ledger domain, and all with an expiry that every write extends
--   1 scopes   hash  what every scope holds. Fields:
--                      T<tenant>          {tokens, requests, request_ms, token_ms,
--                                          parts, at_ms, since_ms, rate,     the token rate's debt
--                                          parts, at_ms, since_ms, rate}     the request rate's debt
--                      L<pool>\0<lane>    {tokens, requests, request_ms, token_ms}
--                      F<pool>\0<lane>    {parts, at_ms, since_ms, rate}     a lane's share of prefill as a debt
--                      R<pool>\0<replica> {tokens, requests, request_ms, token_ms,
--                                          parts, at_ms, since_ms, rate}     the prefill backlog as a debt
--                      C                  {held, orphaned, released, promised}  how many leases are in each state
--                    A scope that holds and owes nothing has no field.
--   2 leases   hash  lease id -> {holder, T field, L field, R field, tokens, work_units, rate or false,
--                      level_parts, residence_ms, granted_at_ms, charged_at_ms, orphan_grace_ms,
--                      policy_version, state}
--   3 dues     zset  lease id -> due_at_ms: when its next step is due (extproc/domain/lease.py)
--   4 holders  zset  holder -> until when it is known to be alive
--   5 waits    hash  who waits (queue.lua). Fields:
--                      I                  {last sequence, {holder = when it was last heard}, {pool = true}}
--                      P<pool>            {pool, wake_at_ms or false, {lane = its line, without the tickets}}
--                      B<pool>\0<lane>\0<tenant>  {{deadline_at_ms, sequence, lease id, enqueued_at_ms}, ...} in order
--                      Q<lease id>        a ticket
--                      N<holder>          {{lease id, reply of reserve}, ...}: what it is to be told
--   6 expiries zset  lease id -> when its ticket's time is over; '' -> never
--     These two are never empty: while a cluster's slot moves, a call that names a key which does not exist is
--     told to try again until the whole slot has moved.
-- Values are msgpack.

local floor, ceil, max, min = math.floor, math.ceil, math.max, math.min
local call, pack, unpack_value = redis.call, cmsgpack.pack, cmsgpack.unpack

local SCOPES, LEASES, DUES, HOLDERS, WAITS, EXPIRIES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]

local PARTS = 60000                    -- parts of one amount; see extproc/domain/budget.py
local CLOCK_STEP_MS = 60000
local RECORD_WAIT_MS = 60000
local LONGEST_RESIDENCE_MS = 10000000
local HELD, ORPHANED, RELEASED, PROMISED = 0, 1, 2, 3
local TOKEN_DEBT, REQUEST_DEBT, BACKLOG, LANE_PREFILL = 4, 8, 4, 0  -- a debt's four numbers follow this position of its scope
local AT_ONCE = 2000                   -- values per call, an even number: Lua's stack takes about 8,000

-- What the batch's header says; batch.lua sets it.
local now, holder, lease_ttl_ms, orphan_grace_ms, pools
local me  -- the batch's holder: {id, lease_ttl_ms, orphan_grace_ms, reply_ms}

-- Division rounds up as q + (-q) % 1 does: exact, and cheaper here than a call of math.ceil.

-- Debts -------------------------------------------------------------------------------------------------

local function parts_at(scope, debt, rate)
  local parts = scope[debt + 1]
  local elapsed = now - scope[debt + 2]
  if elapsed <= 0 then return parts end
  local quotient = parts / rate
  if elapsed >= quotient + (-quotient) % 1 then return 0 end
  return parts - elapsed * rate
end

local function decay(scope, debt, rate)
  local at = scope[debt + 2]
  scope[debt + 1] = parts_at(scope, debt, rate)
  scope[debt + 4] = rate
  if now > at then
    scope[debt + 2] = now
  elseif now < at - CLOCK_STEP_MS then
    scope[debt + 2] = now
    scope[debt + 3] = min(scope[debt + 3], now)
  end
end

local function charge(scope, debt, amount)
  local parts = scope[debt + 1]
  if parts == 0 then scope[debt + 3] = now end
  parts = parts + amount * PARTS
  scope[debt + 1] = parts
  return parts
end

local function refund(scope, debt, amount, charged, level_parts, charged_at)
  if charged_at < scope[debt + 3] then return end
  local rate = scope[debt + 4]
  local elapsed = max(0, scope[debt + 2] - charged_at)
  if elapsed >= ceil(level_parts / rate) then return end
  local owed = min(charged * PARTS, level_parts - elapsed * rate)
  scope[debt + 1] = max(0, scope[debt + 1] - min(amount * PARTS, owed))
end

-- Waits -------------------------------------------------------------------------------------------------

local function wait_ms(shortfall, held, products)
  if held <= 0 then return 1 end
  local mean = ceil(products / held)
  return max(1, ceil(shortfall * mean / held))
end

local function rate_wait_ms(parts, amount, rate, burst)
  local excess = parts + (amount - burst) * PARTS
  if excess <= 0 then return 0 end
  return ceil(excess / rate)
end

-- Scopes: read once, changed in memory, written once ------------------------------------------------------

local scopes, dirty = {}, {}

local SIZES = { T = 12, L = 4, F = 4, R = 8, C = 4 }
local byte_of = string.byte
local KIND_C, KIND_F = byte_of('C'), byte_of('F')

local function fresh(field)
  local kind = string.sub(field, 1, 1)
  local scope = {}
  for position = 1, SIZES[kind] do scope[position] = 0 end
  if kind == 'T' then scope[8], scope[12] = 1, 1 elseif kind == 'R' then scope[8] = 1 elseif kind == 'F' then scope[4] = 1 end
  return scope
end

-- A scope that is absent is one that holds nothing; counts that were written before there were promises get one.
local function keep(field, stored)
  local scope = stored and unpack_value(stored) or fresh(field)
  if #scope == 3 then scope[4] = 0 end
  scopes[field] = scope
  return scope
end

-- For looking.
local function scope_of(field)
  return scopes[field] or keep(field, call('HGET', SCOPES, field))
end

-- For changing.
local function changed(field)
  dirty[field] = true
  return scopes[field] or keep(field, call('HGET', SCOPES, field))
end

local function is_idle(field, scope)
  local size, kind = #scope, byte_of(field, 1)
  if kind == KIND_C then return scope[1] == 0 and scope[2] == 0 and scope[3] == 0 and scope[4] == 0 end
  if kind == KIND_F then return parts_at(scope, 0, scope[4]) == 0 end
  if scope[2] ~= 0 then return false end
  if size == 4 then return true end
  if parts_at(scope, 4, scope[8]) ~= 0 then return false end
  return size == 8 or parts_at(scope, 8, scope[12]) == 0
end

local function change(field, requests, tokens, residence)
  local scope = changed(field)
  scope[1] = scope[1] + requests * tokens
  scope[2] = scope[2] + requests
  scope[3] = scope[3] + requests * residence
  scope[4] = scope[4] + requests * tokens * residence
end

-- Leases: read once; written in the order in which they changed, so that the last word counts ---------------

local leases, gone = {}, {}
local lease_sets, due_sets = {}, {}

local function lease_of(lease_id)
  local lease = leases[lease_id]
  if lease ~= nil then return lease end
  local stored = call('HGET', LEASES, lease_id)
  lease = stored and unpack_value(stored) or false
  leases[lease_id] = lease
  return lease
end

local function put(lease_id, lease)
  local size = #lease_sets
  lease_sets[size + 1] = lease_id
  lease_sets[size + 2] = pack(lease)
end

local function due(lease_id, due_at)
  local size = #due_sets
  due_sets[size + 1] = due_at
  due_sets[size + 2] = lease_id
end

local function count(state, change)
  local counts = changed('C')
  counts[state + 1] = counts[state + 1] + change
end

local function enter(lease, state)
  count(lease[14], -1)
  count(state, 1)
  lease[14] = state
end

local function hold(lease)
  change(lease[2], 1, lease[5], lease[9])
  change(lease[3], 1, lease[5], lease[9])
  change(lease[4], 1, lease[5], lease[9])
end

-- As if it had not been stored: what comes later in this batch must not see how it was once measured.
local function forget_if_idle(field)
  if is_idle(field, scopes[field]) then scopes[field] = fresh(field) end
end

local function free(lease)
  enter(lease, RELEASED)
  change(lease[2], -1, lease[5], lease[9])
  change(lease[3], -1, lease[5], lease[9])
  change(lease[4], -1, lease[5], lease[9])
  forget_if_idle(lease[2])
  forget_if_idle(lease[4])
end

local function create(lease_id, lease, due_at)
  count(lease[14], 1)
  hold(lease)
  leases[lease_id] = lease
  gone[lease_id] = nil
  put(lease_id, lease)
  due(lease_id, due_at)
end

local function claim(lease_id, lease)
  enter(lease, HELD)
  lease[1] = holder
  put(lease_id, lease)
  due(lease_id, now + lease_ttl_ms)
end

local function forget(lease_id, lease)
  count(lease[14], -1)
  leases[lease_id] = false
  gone[lease_id] = true
end

-- A key that is new, or that somebody wrote without an expiry, gets one; any other a later one in time.
local keep_ms
local function extend(key)
  local left_ms = call('PTTL', key)
  if left_ms ~= -2 and left_ms < keep_ms - floor(keep_ms / 4) then call('PEXPIRE', key, keep_ms) end
end

local function orphaned_until(lease, orphaned_at)
  return min(orphaned_at + lease[12], lease[10] + lease[9])
end

local verbs, wants = {}, {}
