-- reserve: every scope of a reservation, or none.
--
-- op     {'q', lease_id, tenant, tokens_per_minute|false, burst_tokens|false, requests_per_minute|false,
--         inflight_tokens|false, inflight_requests|false, lane, lane_limit_tokens, pool position,
--         input_tokens, total_tokens, work_units, deadline_in_ms, residence_ms}
-- pool   {name, policy_version, request_cap, prefill_tokens_per_s, window_tokens,
--         replica, usable_tokens, replica, usable_tokens, ...}; usable is the ceiling less the guard band
-- reply  {replica, ttft_ms, token parts owed, request parts owed} when granted,
--        {scope number, wait_ms, token parts owed, request parts owed} when denied

local DEADLINE, TOKEN_RATE, REQUEST_RATE, INFLIGHT_TOKENS, INFLIGHT_REQUESTS = 0, 1, 2, 3, 4
local LANE_SHARE, REPLICA_TOKENS, PREFILL_WINDOW, REQUEST_CAP = 5, 6, 7, 8

local function prefill_ms(tokens, per_s)
  local quotient = tokens * 1000 / per_s
  return quotient + (-quotient) % 1
end

-- What batch.lua should have read before: the tenant, the lane, and every replica of the pool.
function wants.q(op, want)
  local pool = pools[op[11] + 1]
  op.tenant_field = 'T' .. op[3]
  op.lane_field = 'L' .. pool[1] .. '\0' .. op[9]
  want(op.tenant_field)
  want(op.lane_field)
  if not pool.fields then
    local fields = {}
    for position = 6, #pool, 2 do
      local field = 'R' .. pool[1] .. '\0' .. pool[position]
      fields[position] = field
      want(field)
    end
    pool.fields = fields
  end
end

function verbs.q(op)
  local lease_id, per_minute, burst, requests_per_minute = op[2], op[4], op[5], op[6]
  local input, total, work, deadline = op[12], op[13], op[14], op[15]
  local pool, tenant_field, lane_field = pools[op[11] + 1], op.tenant_field, op.lane_field
  local per_s = pool[4]
  local tenant = scopes[tenant_field]
  local token_parts = per_minute and parts_at(tenant, TOKEN_DEBT, per_minute) or 0
  local request_parts = requests_per_minute and parts_at(tenant, REQUEST_DEBT, requests_per_minute) or 0

  local existing = lease_of(lease_id)
  if existing and existing[14] ~= RELEASED then
    local backlog = ceil(parts_at(scope_of(existing[4]), BACKLOG, per_s * 60) / PARTS)
    local replica = string.sub(existing[4], string.find(existing[4], '\0', 1, true) + 1)
    return { replica, prefill_ms(backlog, per_s), token_parts, request_parts }
  end

  -- Of the replicas that can take it the one with most room; if none can, the one that may first.
  local best, best_scope, best_wait, best_room, best_backlog, best_ttft
  local cap, window, fields, per_minute_read = pool[3], pool[5], pool.fields, per_s * 60
  for position = 6, #pool, 2 do
    local book = scopes[fields[position]]
    local room = pool[position + 1] - book[1]
    -- One that has less room than one that can take it is not looked at further.
    if best == nil or best_wait > 0 or room >= best_room then
      local quotient = parts_at(book, BACKLOG, per_minute_read) / PARTS
      local backlog = quotient + (-quotient) % 1
      quotient = (backlog + input) * 1000 / per_s
      local ttft = quotient + (-quotient) % 1
      local scope, wait = nil, 0
      if ttft > deadline then
        scope, wait = DEADLINE, ttft - deadline
      end
      if total > room then
        scope = scope or REPLICA_TOKENS
        wait = max(wait, wait_ms(total - room, book[1], book[4]))
      end
      if backlog > 0 and backlog + input > window then
        scope = scope or PREFILL_WINDOW
        wait = max(wait, prefill_ms(min(backlog, backlog + input - window), per_s))
      end
      if book[2] >= cap then
        scope = scope or REQUEST_CAP
        wait = max(wait, wait_ms(book[2] + 1 - cap, book[2], book[3]))
      end
      if best == nil or wait < best_wait
        or (wait == best_wait and (room > best_room or (room == best_room and backlog < best_backlog))) then
        best, best_scope, best_wait, best_room, best_backlog, best_ttft = position, scope, wait, room, backlog, ttft
      end
    end
  end

  local scope, wait = nil, 0
  if best_scope == DEADLINE then
    scope, wait = DEADLINE, best_wait
  end
  if per_minute then
    local rate_wait = rate_wait_ms(token_parts, work, per_minute, burst)
    if rate_wait > 0 then
      scope, wait = scope or TOKEN_RATE, max(wait, rate_wait)
    end
  end
  if requests_per_minute then
    local rate_wait = rate_wait_ms(request_parts, 1, requests_per_minute, requests_per_minute)
    if rate_wait > 0 then
      scope, wait = scope or REQUEST_RATE, max(wait, rate_wait)
    end
  end
  if op[7] and tenant[1] + total > op[7] then
    scope, wait = scope or INFLIGHT_TOKENS, max(wait, wait_ms(tenant[1] + total - op[7], tenant[1], tenant[4]))
  end
  if op[8] and tenant[2] >= op[8] then
    scope, wait = scope or INFLIGHT_REQUESTS, max(wait, wait_ms(tenant[2] + 1 - op[8], tenant[2], tenant[3]))
  end
  local lane = scopes[lane_field]
  if lane[1] + total > op[10] then
    scope, wait = scope or LANE_SHARE, max(wait, wait_ms(lane[1] + total - op[10], lane[1], lane[4]))
  end
  if best_scope then
    scope, wait = scope or best_scope, max(wait, best_wait)
  end
  if scope then return { scope, wait, token_parts, request_parts } end

  if existing then forget(lease_id, existing) end
  local level_parts = 0
  if per_minute then
    decay(tenant, TOKEN_DEBT, per_minute)
    level_parts = charge(tenant, TOKEN_DEBT, work)
    token_parts = level_parts
  end
  if requests_per_minute then
    decay(tenant, REQUEST_DEBT, requests_per_minute)
    request_parts = charge(tenant, REQUEST_DEBT, 1)
  end
  local book = scopes[fields[best]]
  decay(book, BACKLOG, per_minute_read)
  charge(book, BACKLOG, input)
  local residence = op[16]
  if residence > LONGEST_RESIDENCE_MS then residence = LONGEST_RESIDENCE_MS end
  create(lease_id, {
    holder, tenant_field, lane_field, fields[best], total, work, per_minute, level_parts,
    residence, now, now, orphan_grace_ms, pool[2], HELD,
  })
  return { pool[best], best_ttft, token_parts, request_parts }
end
