-- reserve: every scope of a reservation, or none; or a place in line. The op and the pool are told in fitting.lua.
--
-- reply  {replica, ttft_ms, token parts owed, request parts owed, waited_ms} when granted,
--        {scope number, wait_ms, token parts owed, request parts owed} when denied, and after a wait also
--          waited_ms, the scope it was behind or false, requests ahead
--        {false, position, wait_ms, expires_in_ms} when it waits

-- What batch.lua should have read before: the tenant, the lane, and every replica of the pool.
function wants.q(op, want)
  local pool = pools[op[11] + 1]
  op.tenant_field = 'T' .. op[3]
  op.lane_field = 'L' .. pool[1] .. '\0' .. op[9]
  want(op.tenant_field)
  want(op.lane_field)
  if not replica_fields[pool] then
    for _, field in pairs(fields_of(pool)) do want(field) end
  end
end

function verbs.q(op)
  local lease_id, pool = op[2], pools[op[11] + 1]
  local waits = anybody_waits()
  if waits then hear(holder) end
  local existing = lease_of(lease_id)
  if existing and existing[14] ~= RELEASED then
    if existing[14] == PROMISED then
      claim(lease_id, existing)
      drop_news(holder, lease_id)
    end
    local per_s = pool[4]
    local backlog = ceil(parts_at(scope_of(existing[4]), BACKLOG, per_s * 60) / PARTS)
    local replica = string.sub(existing[4], string.find(existing[4], '\0', 1, true) + 1)
    local token_parts, request_parts = owed_parts(op)
    return { replica, prefill_ms(backlog, per_s), token_parts, request_parts, 0 }
  end
  if waits then
    local ticket = ticket_of(lease_id)
    if ticket then return queued(ticket) end
    expire()
  end
  if not index[3][pool[1]] then
    local scope, wait = check(op, pool, op[15])
    if not scope then return grant(op, pool, me, false, nil) end
    if op[17] <= 0 then return denied(op, scope, wait) end
  end
  return line_up(op, pool)
end
