-- snapshot: what the named scopes hold, after all that came before in this batch. Changes nothing.
--
-- op     {'v', {scope field, ...}}
-- reply  {now_ms, {the scope's numbers, ...}, {{pool, lane, requests, input tokens that wait, oldest_ms}, ...}}

function wants.v(op, want)
  for position = 1, #op[2] do want(op[2][position]) end
end

function verbs.v(op)
  local found = {}
  for position = 1, #op[2] do found[position] = scope_of(op[2][position]) end
  local waits = {}
  for _, name in ipairs(line_names()) do
    for lane, one in pairs(line_of(name).lanes) do
      local oldest = now
      for _, tenant in pairs(one.tenants) do oldest = min(oldest, tenant.oldest) end
      waits[#waits + 1] = { name, lane, one.requests, one.input, now - oldest }
    end
  end
  return { now, found, waits }
end
