-- reassert: a living holder holds this, whatever the ledger remembers and whatever the limits are.
--
-- op     {'a', lease_id, tenant, lane, pool, replica, tokens, charge_units, rate|false, residence_ms, age_ms,
--         policy_version}
-- reply  1, or 0 when the lease was known after all and has been renewed

function verbs.a(op)
  local lease_id = op[2]
  withdraw(lease_id)
  if lease_of(lease_id) then
    verbs.n({ 'n', { lease_id } })
    return 0
  end
  local tenant_field = 'T' .. op[3]
  local units, rate, level_parts = op[8], op[9], 0
  if units > 0 and rate then
    local tenant = changed(tenant_field)
    decay(tenant, TOKEN_DEBT, rate)
    level_parts = charge(tenant, TOKEN_DEBT, units)
  else
    rate = false
  end
  create(lease_id, {
    holder, tenant_field, 'L' .. op[5] .. '\0' .. op[4], 'R' .. op[5] .. '\0' .. op[6], op[7], units, rate,
    level_parts, min(op[10], LONGEST_RESIDENCE_MS), now - op[11], now, orphan_grace_ms, op[12], HELD,
  }, now + lease_ttl_ms)
  return 1
end
