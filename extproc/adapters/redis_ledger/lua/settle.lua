-- release: a stream has ended; its tokens and slots are free.
--
-- op     {'e', lease_id}
-- reply  1, or 0 when it already was released, or is unknown
--
-- book: the access-log record has come; the unused part of the charge goes back to the tenant's rate.
--
-- op     {'b', lease_id, work_units|false}
-- reply  1, or 0 when the lease is unknown or was booked before

function verbs.e(op)
  local lease = lease_of(op[2])
  if not lease or lease[14] == RELEASED then return 0 end
  free(lease)
  put(op[2], lease)
  due(op[2], now + RECORD_WAIT_MS)
  return 1
end

function verbs.b(op)
  local lease_id, used = op[2], op[3]
  local lease = lease_of(lease_id)
  if not lease then return 0 end
  if lease[14] ~= RELEASED then free(lease) end
  forget(lease_id, lease)
  local charged, rate = lease[6], lease[7]
  if not used or not rate or used == charged then return 1 end
  local tenant = changed(lease[2])
  -- A tenant that owes nothing has no field, so its rate is not known there; the lease knows it.
  decay(tenant, TOKEN_DEBT, tenant[5] == 0 and rate or tenant[8])
  if used > charged then
    charge(tenant, TOKEN_DEBT, used - charged)
  else
    refund(tenant, TOKEN_DEBT, charged - used, charged, lease[8], lease[11])
  end
  return 1
end
