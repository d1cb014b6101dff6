-- All who wait: when their time is over, and what they are to be told (extproc/domain/waiting.py, books.py).
--
-- withdraw  {'w', lease_id}      reply 1, or 0 when it does not wait (any more)
-- news      {'t'}                reply {{lease id, reply of reserve}, ...}: what the holder is to be told, once;
--                                what was granted is held from now on
-- wake      {'k'}                time has its effect. reply when it next has one, or false
-- capacity  {'c', pool position, {lane = tokens}}
--                                whoever waits for this pool is measured by it from now on, and by what its lanes
--                                may hold of it. reply 1

-- What the other files use; the rest is this file's own (a script may have 200 locals).
local hear, forget_silent, drop_news, promote_after, withdraw, expire, queued, line_up

do

local PROMOTED_AT_ONCE = 32
local EXPIRED_AT_ONCE = 8
local HEARD_FOR_MS = 600000

function hear(name)
  index[2][name] = now
  index_changed = true
end

local function is_silent(who)
  local heard_at = index[2][who[1]]
  return not heard_at or now - heard_at > who[4]
end

function forget_silent()
  for name, heard_at in pairs(index[2]) do
    if now - heard_at > HEARD_FOR_MS then
      index[2][name] = nil
      index_changed = true
      news[name], news_changed[name] = {}, true
    end
  end
end

function drop_news(name, lease_id)
  if not index[2][name] then return end
  local told = news_of(name)
  for position = #told, 1, -1 do
    if told[position][1] == lease_id then
      remove(told, position)
      news_changed[name] = true
    end
  end
end

local function forget_ticket(lease_id)
  tickets[lease_id] = false
  tickets_changed[lease_id] = true
  call('ZREM', EXPIRIES, lease_id)
end

-- End a ticket's wait. The caller takes it out of its line.
local function answer(ticket, reply)
  local lease_id, name = ticket.op[2], ticket.who[1]
  ticket.answer = reply
  if ticket.fresh then return end
  forget_ticket(lease_id)
  local told = news_of(name)
  told[#told + 1] = { lease_id, reply }
  news_changed[name] = true
end

local function close_if_empty(line)
  if lines[line.name] == line and line_is_empty(line) then
    lines[line.name], lines_changed[line.name] = false, true
    index[3][line.name] = nil
    index_changed = true
  end
end

local function leave(ticket)
  local line = line_of(ticket.op[11])
  line_remove(line, ticket)
  close_if_empty(line)
end

-- A denial of a ticket that is in its line; the wait is what it would be for another that came now.
local function sorry(ticket, scope, wait)
  local op = ticket.op
  local line = line_of(op[11])
  local requests, tokens, input = ahead_of(line, ticket)
  if not wait then
    local _, tenant_wait = check_tenant(op)
    wait = max(1, drain_ms(op, line.pool, requests, tokens, input), tenant_wait)
  end
  local reply = denied(op, scope, wait)
  reply[5], reply[6], reply[7] = max(0, now - ticket.at), ticket.behind, requests
  return reply
end

-- What one is told whose time is over: as long as its lane, or its deadline, lets it.
local function over(ticket)
  return sorry(ticket, ticket.expires_at - ticket.at >= ticket.op[17] and RESIDENCE or DEADLINE)
end

-- Why a newcomer that cannot go now should be refused now rather than later, if it should.
local function no_use_waiting(ticket, line)
  local op = ticket.op
  local scope, wait = check(op, line.pool, op[15])
  local requests, tokens, input = ahead_of(line, ticket)
  local predicted = drain_ms(op, line.pool, requests, tokens, input)
  if op[17] <= 0 then return denied(op, scope or REPLICA_TOKENS, max(wait, predicted)) end
  local late = predicted + prefill_ms(op[12], line.pool[4]) - op[15]
  if late > 0 or not seen.in_time then return sorry(ticket, DEADLINE, max(1, late)) end
  if seen.token_wait > 0 and now + seen.token_wait >= ticket.expires_at then return denied(op, TOKEN_RATE, wait) end
  if seen.request_wait > 0 and now + seen.request_wait >= ticket.expires_at then
    return denied(op, REQUEST_RATE, wait)
  end
  return nil
end

-- What a newcomer is told that cannot wait: because of its lane, or because of its deadline.
local function last_word(ticket, line)
  if ticket.op[17] <= 0 or seen.tenant_scope then
    local scope, wait = seen.scope, seen.wait
    return no_use_waiting(ticket, line) or denied(ticket.op, scope, wait)
  end
  return sorry(ticket, DEADLINE)
end

-- Grant a ticket's reservation if everything fits; else say what is in the way, and until when.
local function attempt(ticket, line)
  local op = ticket.op
  if not ticket.fresh and ticket.expires_at <= now then
    answer(ticket, over(ticket))
    return GONE
  end
  if is_silent(ticket.who) then
    answer(ticket, sorry(ticket, WITHDRAWN))
    return GONE
  end
  local limit = line.lanes[op[9]].limit
  if op[10] ~= limit then
    op[10] = limit
    tickets_changed[op[2]] = true
  end
  local scope = check(op, line.pool, ticket.deadline_at - now)
  if not scope and (op[17] > 0 or leaves_room(op, line.pool, ahead_of(line, ticket))) then
    answer(ticket, grant(op, line.pool, ticket.who, not ticket.fresh, ticket.at))
    return GRANTED
  end
  if ticket.fresh and ticket.expires_at <= now then
    answer(ticket, last_word(ticket, line))
    return GONE
  end
  if not seen.in_time then
    answer(ticket, sorry(ticket, DEADLINE))
    return GONE
  end
  local lane_scope = seen.lane_scope
  if lane_scope == LANE_SHARE and seen.best_scope and op[10] >= usable_tokens(line.pool) then
    -- The lane may have all of the pool: then it is the pool that is full, and small ones may pass.
    lane_scope = seen.lane_prefill_wait and LANE_PREFILL_SHARE
  end
  scope = seen.tenant_scope or lane_scope or seen.best_scope
  if ticket.behind ~= scope then
    ticket.behind = scope
    tickets_changed[op[2]] = true
  end
  if seen.tenant_scope then return TENANT, seen.tenant_timed and now + seen.tenant_wait or nil end
  if lane_scope then
    return LANE, lane_scope == LANE_PREFILL_SHARE and now + seen.lane_prefill_wait or nil
  end
  return POOL, seen.window_wait and now + seen.window_wait or nil
end

local function promote(name)
  local line = line_of(name)
  if not line then return end
  if line_promote(line, attempt, PROMOTED_AT_ONCE) then line.wake = now end
  close_if_empty(line)
end

-- Something of this lease's came free: for its pool, and for its tenant wherever it waits.
function promote_after(lease)
  if not anybody_waits() then return end
  local tenant = string.sub(lease[2], 2)
  local pool = string.sub(lease[3], 2, string.find(lease[3], '\0', 1, true) - 1)
  for _, name in ipairs(line_names()) do
    if line_unpark(line_of(name), tenant) or name == pool then promote(name) end
  end
end

function withdraw(lease_id)
  if not anybody_waits() then return 0 end
  local ticket = ticket_of(lease_id)
  if not ticket then return 0 end
  forget_ticket(lease_id)
  leave(ticket)
  promote(ticket.op[11])
  return 1
end

local function first_expiry(until_ms)
  while true do
    local found = call('ZRANGEBYSCORE', EXPIRIES, '-inf', until_ms, 'WITHSCORES', 'LIMIT', 0, 1)
    if not found[1] then return nil end
    local ticket = ticket_of(found[1])
    if ticket then return ticket end
    call('ZREM', EXPIRIES, found[1])
  end
end

-- End what is over, and let go whoever it has kept.
function expire()
  if not anybody_waits() then return end
  local kept, names = {}, {}
  for _ = 1, EXPIRED_AT_ONCE do
    local ticket = first_expiry(string.format('%.0f', now))
    if not ticket then break end
    local name = ticket.op[11]
    if not kept[name] then
      kept[name] = true
      names[#names + 1] = name
    end
    answer(ticket, over(ticket))
    leave(ticket)
  end
  table.sort(names, before)
  for _, name in ipairs(names) do promote(name) end
end

function queued(ticket)
  local op = ticket.op
  local line = line_of(op[11])
  local requests, tokens, input = ahead_of(line, ticket)
  local wait = drain_ms(op, line.pool, requests, tokens, input)
  return { false, requests + 1, wait, max(0, ticket.expires_at - now) }
end

-- Take a place in line; then go at once if it is its turn, or wait if that makes sense.
function line_up(asked, pool)
  local op = {}
  for position = 1, #asked do op[position] = asked[position] end
  op[11], op[24] = pool[1], pool[2]
  named_op(op)
  hear(holder)
  index[1] = index[1] + 1
  local deadline_at = now + op[15]
  local ticket = {
    op = op, tokens = max(1, op[13]), who = me, sequence = index[1], at = now,
    expires_at = min(now + op[17], deadline_at - prefill_ms(op[12], pool[4])),
    deadline_at = deadline_at, passed = 0, behind = false, fresh = true,
  }
  local lease_id, name = op[2], pool[1]
  local line = line_of(name)
  if not line then
    line = { name = name, wake = false, lanes = {} }
    lines[name] = line
    index[3][name] = true
  end
  line.pool = pool
  tickets[lease_id] = ticket
  line_add(line, ticket)
  promote(name)
  if ticket.answer then
    tickets[lease_id] = false
    return ticket.answer
  end
  local refusal, pushed = no_use_waiting(ticket, line), {}
  if not refusal then
    pushed = pushed_out_by(line, ticket)
    if not pushed then refusal = sorry(ticket, QUEUE) end
  end
  if refusal then
    leave(ticket)
    tickets[lease_id] = false
    return refusal
  end
  for _, other in ipairs(pushed) do
    answer(other, sorry(other, QUEUE))
    line_remove(line, other)
  end
  ticket.fresh = false
  tickets_changed[lease_id] = true
  call('ZADD', EXPIRIES, ticket.expires_at, lease_id)
  return queued(ticket)
end

function verbs.w(op) return withdraw(op[2]) end

function verbs.t()
  if not (index[2][holder] or anybody_waits()) then return {} end
  hear(holder)
  local told = news_of(holder)
  if not told[1] then return {} end
  news[holder], news_changed[holder] = {}, true
  for _, one in ipairs(told) do
    local lease = lease_of(one[1])
    if type(one[2][1]) == 'string' and lease and lease[14] == PROMISED then claim(one[1], lease) end
  end
  return told
end

function verbs.k()
  expire()
  for _, name in ipairs(line_names()) do
    local line = line_of(name)
    if line and line.wake and line.wake <= now then promote(name) end
  end
  local wake = false
  for _, name in ipairs(line_names()) do
    local its = line_of(name).wake
    if its and (not wake or its < wake) then wake = its end
  end
  local first = anybody_waits() and first_expiry('9007199254740991')
  if first and (not wake or first.expires_at < wake) then wake = first.expires_at end
  return wake
end

function verbs.c(op)
  local pool = pools[op[2] + 1]
  local line = line_of(pool[1])
  if line then
    line.pool = pool
    for lane, limit in pairs(op[3]) do
      if line.lanes[lane] then line.lanes[lane].limit = limit end
    end
    promote(pool[1])
  end
  return 1
end

end
