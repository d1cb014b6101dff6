-- orphan: the holder leaves and the answer goes on: the lease stays for its grace.
--
-- op     {'o', lease_id}
-- reply  1, or 0 when it is not held
--
-- reclaim: at most `most` leases take the step whose moment has come, the longest overdue first. Every batch
-- begins with it, so whoever comes next tidies up after the dead, a little at a time.
--
-- returns orphaned, freed, forgotten, taken back (promised, and its holder never asked)
--
-- sweep: forget tenants, lanes and replicas that hold and owe nothing, and holders that are silent for long.
--
-- op     {'s', cursor}
-- reply  the next cursor; '0' when it has been all round

function verbs.o(op)
  local lease = lease_of(op[2])
  if not lease or lease[14] ~= HELD then return 0 end
  enter(lease, ORPHANED)
  put(op[2], lease)
  due(op[2], orphaned_until(lease, now))
  return 1
end

local function reclaim(most)
  local orphaned, freed, forgotten, taken_back = 0, 0, 0, 0
  local found = call('ZRANGEBYSCORE', DUES, '-inf', string.format('%.0f', now), 'WITHSCORES', 'LIMIT', 0, most)
  local due_leases = {}
  for position = 1, #found, 2 do due_leases[position] = lease_of(found[position]) end
  for position = 1, #found, 2 do
    local lease_id, due_at = found[position], tonumber(found[position + 1])
    local lease = due_leases[position]
    if leases[lease_id] ~= lease then
      -- Another one of this id has been granted meanwhile.
    elseif not lease then
      gone[lease_id] = true
    elseif lease[14] == PROMISED then
      drop_news(lease[1], lease_id)
      book(lease_id, 0)  -- no engine has seen it
      taken_back = taken_back + 1
    elseif lease[14] == RELEASED then
      forget(lease_id, lease)
      forgotten = forgotten + 1
    else
      local until_ms = due_at
      if lease[14] == HELD then
        until_ms = orphaned_until(lease, due_at)
        enter(lease, ORPHANED)
        orphaned = orphaned + 1
      end
      local over = until_ms <= now
      if over then
        free(lease)
        until_ms = now + RECORD_WAIT_MS
        freed = freed + 1
      end
      put(lease_id, lease)
      due(lease_id, until_ms)
      if over then promote_after(lease) end
    end
  end
  return orphaned, freed, forgotten, taken_back
end

local SWEPT_AT_ONCE = 32

function verbs.s(op)
  forget_silent()
  local found = call('HSCAN', SCOPES, op[2], 'COUNT', SWEPT_AT_ONCE)
  for position = 1, #found[2], 2 do
    local field = found[2][position]
    -- What is written at the end of the batch is swept there.
    if is_idle(field, scope_of(field)) then dirty[field] = true end
  end
  return found[1]
end
