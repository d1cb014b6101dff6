-- Does it fit, and if not, what is in the way and for how long? And taking it, if it does.
--
-- op     {'q', lease_id, tenant, tokens_per_minute|false, burst_tokens|false, requests_per_minute|false,
--         inflight_tokens|false, inflight_requests|false, lane, lane_limit_tokens, pool position,
--         input_tokens, total_tokens, work_units, deadline_in_ms, residence_ms,
--         hold_ms, weight, queue_requests, queue_tokens, floor_permille, prefill_share_permille,
--         spare_replicas}
--        In a ticket the pool's name stands for its position, and the policy version follows at the end.
-- pool   {name, policy_version, request_cap, prefill_tokens_per_s, window_tokens, window_ms,
--         replica, usable_tokens, replica, usable_tokens, ...}; usable is the ceiling less the guard band

local DEADLINE, TOKEN_RATE, REQUEST_RATE, INFLIGHT_TOKENS, INFLIGHT_REQUESTS = 0, 1, 2, 3, 4
local LANE_SHARE, REPLICA_TOKENS, PREFILL_WINDOW, REQUEST_CAP = 5, 6, 7, 8
local LANE_PREFILL_SHARE, QUEUE, RESIDENCE, WITHDRAWN = 9, 10, 11, 12
local FIRST_REPLICA = 7
local WHOLE_PERMILLE = 1000

local function prefill_ms(tokens, per_s)
  local quotient = tokens * 1000 / per_s
  return quotient + (-quotient) % 1
end

local replica_fields = {}
local function fields_of(pool)
  local fields = replica_fields[pool]
  if not fields then
    fields = {}
    for position = FIRST_REPLICA, #pool, 2 do fields[position] = 'R' .. pool[1] .. '\0' .. pool[position] end
    replica_fields[pool] = fields
  end
  return fields
end

local function prefill_field(op) return 'F' .. string.sub(op.lane_field, 2) end

local function lane_prefill_rate(pool, share)
  local replicas = (#pool - FIRST_REPLICA + 1) / 2
  return max(1, floor(pool[4] * 60 * replicas * share / WHOLE_PERMILLE))
end

-- What check found: `scope` refuses first (nil: none does) and `wait` is the longest of the waits of all.
local seen = {}

-- The tenant's own limits.
local function check_tenant(op)
  local per_minute, requests_per_minute = op[4], op[6]
  local tenant, total = scope_of(op.tenant_field), op[13]
  local scope, wait, token_wait, request_wait, timed = nil, 0, 0, 0, true
  if per_minute then
    token_wait = rate_wait_ms(parts_at(tenant, TOKEN_DEBT, per_minute), op[14], per_minute, op[5])
    if token_wait > 0 then scope, wait = TOKEN_RATE, token_wait end
  end
  if requests_per_minute then
    local parts = parts_at(tenant, REQUEST_DEBT, requests_per_minute)
    request_wait = rate_wait_ms(parts, 1, requests_per_minute, requests_per_minute)
    if request_wait > 0 then scope, wait = scope or REQUEST_RATE, max(wait, request_wait) end
  end
  if op[7] and tenant[1] + total > op[7] then
    scope, wait = scope or INFLIGHT_TOKENS, max(wait, wait_ms(tenant[1] + total - op[7], tenant[1], tenant[4]))
    timed = false
  end
  if op[8] and tenant[2] >= op[8] then
    scope, wait = scope or INFLIGHT_REQUESTS, max(wait, wait_ms(tenant[2] + 1 - op[8], tenant[2], tenant[3]))
    timed = false
  end
  seen.token_wait, seen.request_wait, seen.tenant_timed = token_wait, request_wait, timed
  seen.tenant_scope, seen.tenant_wait = scope, wait
  return scope, wait
end

-- Until as many replicas have nothing to read as must be left, and one more.
local function spare_wait(pool, fields, spare, per_s)
  local backlogs = {}
  for position = FIRST_REPLICA, #pool, 2 do
    backlogs[#backlogs + 1] = ceil(parts_at(scope_of(fields[position]), BACKLOG, per_s * 60) / PARTS)
  end
  spare = min(spare, #backlogs - 1)
  if spare == 0 then return 0 end
  table.sort(backlogs)
  return prefill_ms(backlogs[spare + 1], per_s)
end

-- What stands in the way in `pool`, with the first token due in `deadline`.
local function check(op, pool, deadline)
  local input, total, per_s = op[12], op[13], pool[4]
  -- Of the replicas that can take it the one with most room; if none can, the one that may first.
  local best, best_scope, best_wait, best_room, best_backlog, best_ttft
  local window_wait, in_time = nil, false
  local cap, window, fields, per_minute_read = pool[3], pool[5], fields_of(pool), per_s * 60
  for position = FIRST_REPLICA, #pool, 2 do
    local book = scope_of(fields[position])
    local room = pool[position + 1] - book[1]
    -- One that has less room than one that can take it is not looked at further.
    if best == nil or best_wait > 0 or room >= best_room then
      local quotient = parts_at(book, BACKLOG, per_minute_read) / PARTS
      local backlog = quotient + (-quotient) % 1
      quotient = (backlog + input) * 1000 / per_s
      local ttft = quotient + (-quotient) % 1
      local scope, wait, only_window = nil, 0, nil
      if ttft > deadline then
        scope, wait = DEADLINE, ttft - deadline
      else
        in_time = true
      end
      if total > room then
        scope = scope or REPLICA_TOKENS
        wait = max(wait, wait_ms(total - room, book[1], book[4]))
      end
      if backlog > 0 and backlog + input > window then
        local excess = prefill_ms(min(backlog, backlog + input - window), per_s)
        if not scope then scope, only_window = PREFILL_WINDOW, excess end
        wait = max(wait, excess)
      end
      if book[2] >= cap then
        scope, only_window = scope or REQUEST_CAP, nil
        wait = max(wait, wait_ms(book[2] + 1 - cap, book[2], book[3]))
      end
      if only_window and (not window_wait or only_window < window_wait) then window_wait = only_window end
      if best == nil or wait < best_wait
        or (wait == best_wait and (room > best_room or (room == best_room and backlog < best_backlog))) then
        best, best_scope, best_wait, best_room, best_backlog, best_ttft = position, scope, wait, room, backlog, ttft
      end
    end
  end

  local scope, wait = nil, 0
  if best_scope == DEADLINE then scope, wait = DEADLINE, best_wait end
  local its_scope, its_wait = check_tenant(op)
  if its_scope then scope, wait = scope or its_scope, max(wait, its_wait) end
  local lane = scope_of(op.lane_field)
  local lane_scope, lane_prefill_wait = nil, nil
  if lane[1] + total > op[10] then
    lane_scope = LANE_SHARE
    scope, wait = scope or LANE_SHARE, max(wait, wait_ms(lane[1] + total - op[10], lane[1], lane[4]))
  end
  if op[22] < WHOLE_PERMILLE then
    local rate = lane_prefill_rate(pool, op[22])
    local parts = parts_at(scope_of(prefill_field(op)), LANE_PREFILL, rate)
    local excess = min(parts, parts + input * PARTS - rate * pool[6])
    if excess > 0 then
      lane_scope, lane_prefill_wait = lane_scope or LANE_PREFILL_SHARE, ceil(excess / rate)
      scope, wait = scope or LANE_PREFILL_SHARE, max(wait, lane_prefill_wait)
    end
  end
  if op[23] > 0 then
    local idle_in = spare_wait(pool, fields, op[23], per_s)
    if idle_in > 0 then
      lane_scope = lane_scope or LANE_PREFILL_SHARE
      lane_prefill_wait = max(lane_prefill_wait or 0, idle_in)
      scope, wait = scope or LANE_PREFILL_SHARE, max(wait, idle_in)
    end
  end
  if best_scope then scope, wait = scope or best_scope, max(wait, best_wait) end
  seen.scope, seen.wait, seen.best, seen.ttft, seen.best_scope = scope, wait, best, best_ttft, best_scope
  seen.lane_scope, seen.lane_prefill_wait = lane_scope, lane_prefill_wait
  seen.window_wait, seen.in_time = window_wait, in_time
  return scope, wait
end

-- What the tenant owes, of the token rate and of the request rate, in parts.
local function owed_parts(op)
  local tenant = scope_of(op.tenant_field)
  return op[4] and parts_at(tenant, TOKEN_DEBT, op[4]) or 0, op[6] and parts_at(tenant, REQUEST_DEBT, op[6]) or 0
end

local function usable_tokens(pool)
  local tokens = 0
  for position = FIRST_REPLICA, #pool, 2 do tokens = tokens + pool[position + 1] end
  return tokens
end

local function denied(op, scope, wait)
  local token_parts, request_parts = owed_parts(op)
  return { scope, wait, token_parts, request_parts }
end

-- Take every scope on the replica that check has found. What is granted to one who is not asking is promised.
local function grant(op, pool, who, promised, enqueued_at)
  local lease_id, per_minute, requests_per_minute = op[2], op[4], op[6]
  local fields, best, ttft = fields_of(pool), seen.best, seen.ttft
  local existing = lease_of(lease_id)
  if existing then forget(lease_id, existing) end
  local tenant, token_parts, request_parts, level_parts = scope_of(op.tenant_field), 0, 0, 0
  if per_minute then
    decay(tenant, TOKEN_DEBT, per_minute)
    level_parts = charge(tenant, TOKEN_DEBT, op[14])
    token_parts = level_parts
  end
  if requests_per_minute then
    decay(tenant, REQUEST_DEBT, requests_per_minute)
    request_parts = charge(tenant, REQUEST_DEBT, 1)
  end
  local book = scope_of(fields[best])
  decay(book, BACKLOG, pool[4] * 60)
  charge(book, BACKLOG, op[12])
  if op[22] < WHOLE_PERMILLE then
    local lane = changed(prefill_field(op))
    decay(lane, LANE_PREFILL, lane_prefill_rate(pool, op[22]))
    charge(lane, LANE_PREFILL, op[12])
  end
  create(lease_id, {
    who[1], op.tenant_field, op.lane_field, fields[best], op[13], op[14], per_minute, level_parts,
    min(op[16], LONGEST_RESIDENCE_MS), now, now, who[3], op[24] or pool[2], promised and PROMISED or HELD,
  }, now + (promised and who[4] or who[2]))
  return { pool[best], ttft, token_parts, request_parts, enqueued_at and max(0, now - enqueued_at) or 0 }
end

-- All replicas of a pool taken together.
local function pool_state(pool)
  local room_tokens, room_requests, backlog, tokens, requests, request_ms, token_ms = 0, 0, 0, 0, 0, 0, 0
  local fields = fields_of(pool)
  for position = FIRST_REPLICA, #pool, 2 do
    local book = scope_of(fields[position])
    room_tokens = room_tokens + max(0, pool[position + 1] - book[1])
    room_requests = room_requests + max(0, pool[3] - book[2])
    backlog = backlog + ceil(parts_at(book, BACKLOG, pool[4] * 60) / PARTS)
    tokens, requests = tokens + book[1], requests + book[2]
    request_ms, token_ms = request_ms + book[3], token_ms + book[4]
  end
  return room_tokens, room_requests, backlog, tokens, requests, request_ms, token_ms
end

-- How long until it is its turn with so much before it (extproc/domain/fitting.py).
local function drain_ms(op, pool, ahead_requests, ahead_tokens, ahead_input)
  local room_tokens, room_requests, backlog, tokens, requests, request_ms, token_ms = pool_state(pool)
  local speed = pool[4] * (#pool - FIRST_REPLICA + 1) / 2
  local reading, leaving = ceil((backlog + ahead_input) * 1000 / speed), 0
  local shortfall_tokens = ahead_tokens + op[13] - room_tokens
  if shortfall_tokens > 0 then leaving = wait_ms(shortfall_tokens, tokens, token_ms) end
  local shortfall_requests = ahead_requests + 1 - room_requests
  if shortfall_requests > 0 and requests > 0 then
    local mean = ceil(request_ms / requests)
    leaving = max(leaving, ceil(shortfall_requests * mean / (requests + room_requests)))
  end
  return reading + leaving
end

-- Whether one that will not wait leaves the room that those before it wait for.
local function leaves_room(op, pool, ahead_requests, ahead_tokens, ahead_input)
  local room_tokens, room_requests, backlog = pool_state(pool)
  local window = pool[5] * (#pool - FIRST_REPLICA + 1) / 2
  return op[13] <= room_tokens - ahead_tokens and ahead_requests < room_requests
    and (ahead_input == 0 or backlog + ahead_input + op[12] <= window)
end
