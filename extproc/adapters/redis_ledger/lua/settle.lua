-- release: a stream has ended; its tokens and slots are free. A request of this id that waits gives up its place.
--
-- op     {'e', lease_id}
-- reply  1, or 0 when it already was released, or is unknown
--
-- book: the access-log record has come; the unused part of the charge goes back to the tenant's rate.
--
-- op     {'b', lease_id, work_units|false}
-- reply  1, or 0 when the lease is unknown or was booked before

function verbs.e(op)
  local lease_id = op[2]
  withdraw(lease_id)
  local lease = lease_of(lease_id)
  if not lease or lease[14] == RELEASED then return 0 end
  free(lease)
  put(lease_id, lease)
  due(lease_id, now + RECORD_WAIT_MS)
  promote_after(lease)
  return 1
end

local function settle_charge(lease, used)
  local charged, rate = lease[6], lease[7]
  if not used or not rate or used == charged then return end
  local tenant = changed(lease[2])
  -- A tenant that owes nothing has no field, so its rate is not known there; the lease knows it.
  decay(tenant, TOKEN_DEBT, tenant[5] == 0 and rate or tenant[8])
  if used > charged then
    charge(tenant, TOKEN_DEBT, used - charged)
  else
    refund(tenant, TOKEN_DEBT, charged - used, charged, lease[8], lease[11])
  end
end

local function book(lease_id, used)
  local lease = lease_of(lease_id)
  if not lease then return 0 end
  if lease[14] ~= RELEASED then free(lease) end
  forget(lease_id, lease)
  settle_charge(lease, used)
  promote_after(lease)
  return 1
end

function verbs.b(op) return book(op[2], op[3]) end
