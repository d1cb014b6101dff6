-- renew: the holder is alive, and so are these leases.
--
-- op     {'n', {lease_id, ...}}
-- reply  {lease ids that are unknown}
--
-- A lease that was reclaimed while its holder was out of touch is held again.

function wants.n(op, _, want_lease)
  for position = 1, #op[2] do want_lease(op[2][position]) end
end

function verbs.n(op)
  local unknown = {}
  local ids = op[2]
  for position = 1, #ids do
    local lease_id = ids[position]
    local lease = lease_of(lease_id)
    if not lease then
      unknown[#unknown + 1] = lease_id
    else
      if lease[14] ~= HELD or lease[1] ~= holder then
        if lease[14] == RELEASED then hold(lease) end
        claim(lease_id, lease)
      else
        due(lease_id, now + lease_ttl_ms)
      end
    end
  end
  return unknown
end

-- alive: the holder says that it lives; and how many do?
--
-- op     {'h', ttl_ms}: 0 when it leaves
-- reply  holders alive, this one included

function verbs.h(op)
  if op[2] > 0 then
    call('ZADD', HOLDERS, now + op[2], holder)
  else
    call('ZREM', HOLDERS, holder)
  end
  extend(HOLDERS)
  call('ZREMRANGEBYSCORE', HOLDERS, '-inf', now - 3600000)
  return call('ZCOUNT', HOLDERS, '(' .. string.format('%.0f', now), '+inf')
end
