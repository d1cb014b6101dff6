-- The line of a pool: who waits, in which order, who may pass whom (extproc/domain/queue.py, same names).
--
-- lane    {queue_requests, queue_tokens, floor_permille, requests, tokens, input_tokens, weight, virtual,
--          owed_permille,
--          {tenant = {weight, start, tokens, input_tokens, requests, parked_until_ms or false, oldest_at_ms}},
--          {tenant without tickets = where its last grant ended}, limit_tokens}
-- ticket  {op of reserve with the pool's name, tokens, {holder, lease_ttl_ms, orphan_grace_ms, reply_ms},
--          sequence, enqueued_at_ms, expires_at_ms, deadline_at_ms, passed_tokens, behind or false}
--
-- All of it is read when it is looked at first and written once, at the end of the batch.

local LANES = { 'interactive', 'bulk', 'overflow' }  -- downwards
local GRANTED, GONE, TENANT, LANE, POOL = 1, 2, 3, 4, 5
local remove = table.remove

local index                       -- {last sequence, heard, pools in which somebody waits}
local index_changed = false
local lines, tickets, lists, news = {}, {}, {}, {}  -- false: there is none
local lines_changed, tickets_changed, lists_changed, news_changed = {}, {}, {}, {}

-- What the other files use; the rest is this file's own (a script may have 200 locals).
local anybody_waits, read_index, line_of, line_names, named_op, ticket_of, news_of, line_add, line_remove,
  line_unpark, line_is_empty, pushed_out_by, ahead_of, line_promote, waits_written, before

do

local VIRTUAL_PARTS = 1000
local LOOKED_AT, LOOKED_AT_PER_TENANT = 16, 4
local PASSES_IN_SIZE = 4
local PUSHED_OUT_AT_ONCE = 4
local NEVER_MS = 4503599627370496

local insert, byte = table.insert, string.byte

-- Text by its bytes: the order of the model, whatever the server's locale is.
function before(one, other)
  if one == other then return false end
  local shorter = min(#one, #other)
  for position = 1, shorter do
    local left, right = byte(one, position), byte(other, position)
    if left ~= right then return left < right end
  end
  return #one < #other
end

function read_index()
  local stored = call('HGET', WAITS, 'I')
  if stored then
    index = unpack_value(stored)
    return
  end
  index, index_changed = { 0, {}, {} }, true
  call('ZADD', EXPIRIES, '9007199254740992', '')
end

function anybody_waits() return next(index[3]) ~= nil end

local function place_in(names, tenants, key, name)
  local value = tenants[name][key]
  local low, high = 1, #names + 1
  while low < high do
    local middle = floor((low + high) / 2)
    local other = names[middle]
    local its = tenants[other][key]
    if its < value or (its == value and before(other, name)) then low = middle + 1 else high = middle end
  end
  insert(names, low, name)
end

local function discard(names, name)
  for position = 1, #names do
    if names[position] == name then return remove(names, position) end
  end
end

-- Reading ------------------------------------------------------------------------------------------------

local function lane_from(stored)
  local lane = {
    queue_requests = stored[1], queue_tokens = stored[2], floor = stored[3], requests = stored[4],
    tokens = stored[5], input = stored[6], weight = stored[7], virtual = stored[8], owed = stored[9],
    tenants = {}, ahead = stored[11], limit = stored[12], ready = {}, parked = {},
  }
  for name, one in pairs(stored[10]) do
    lane.tenants[name] = {
      weight = one[1], start = one[2], tokens = one[3], input = one[4], requests = one[5], parked = one[6],
      oldest = one[7],
    }
    insert(one[6] and lane.parked or lane.ready, name)
  end
  local tenants = lane.tenants
  table.sort(lane.ready, function(one, other)
    local left, right = tenants[one].start, tenants[other].start
    return left < right or (left == right and before(one, other))
  end)
  table.sort(lane.parked, function(one, other)
    local left, right = tenants[one].parked, tenants[other].parked
    return left < right or (left == right and before(one, other))
  end)
  return lane
end

function line_of(name)
  local line = lines[name]
  if line ~= nil then return line end
  local stored = index[3][name] and call('HGET', WAITS, 'P' .. name)
  line = false
  if stored then
    stored = unpack_value(stored)
    line = { name = name, pool = stored[1], wake = stored[2], lanes = {} }
    for lane, one in pairs(stored[3]) do line.lanes[lane] = lane_from(one) end
  end
  lines[name] = line
  return line
end

function line_names()
  local names = {}
  for name in pairs(index[3]) do names[#names + 1] = name end
  table.sort(names, before)
  return names
end

function named_op(op)
  op.tenant_field = 'T' .. op[3]
  op.lane_field = 'L' .. op[11] .. '\0' .. op[9]
  return op
end

function ticket_of(lease_id)
  local ticket = tickets[lease_id]
  if ticket ~= nil then return ticket end
  local stored = call('HGET', WAITS, 'Q' .. lease_id)
  ticket = false
  if stored then
    stored = unpack_value(stored)
    ticket = {
      op = named_op(stored[1]), tokens = stored[2], who = stored[3], sequence = stored[4], at = stored[5],
      expires_at = stored[6], deadline_at = stored[7], passed = stored[8], behind = stored[9],
    }
  end
  tickets[lease_id] = ticket
  return ticket
end

local function list_field(op) return 'B' .. op[11] .. '\0' .. op[9] .. '\0' .. op[3] end

local function list_of(op)
  local field = list_field(op)
  local list = lists[field]
  if list == nil then
    local stored = call('HGET', WAITS, field)
    list = stored and unpack_value(stored) or {}
    lists[field] = list
  end
  return list, field
end

local function list_in(line, lane, tenant) return list_of({ [3] = tenant, [9] = lane, [11] = line.name }) end

function news_of(name)
  local told = news[name]
  if told == nil then
    local stored = call('HGET', WAITS, 'N' .. name)
    told = stored and unpack_value(stored) or {}
    news[name] = told
  end
  return told
end

-- A lane's part of the line ------------------------------------------------------------------------------

local function virtual_cost(tokens, weight) return max(1, floor(tokens * VIRTUAL_PARTS / weight)) end

local function take_out(lane, name, tenant)
  if tenant.parked then
    discard(lane.parked, name)
    tenant.parked = false
  else
    discard(lane.ready, name)
  end
end

local function list_position(list, ticket)
  for position = 1, #list do
    local one = list[position]
    if one[1] > ticket.deadline_at or (one[1] == ticket.deadline_at and one[2] >= ticket.sequence) then
      return position
    end
  end
  return #list + 1
end

function line_add(line, ticket)
  local op = ticket.op
  local lane = line.lanes[op[9]]
  if not lane then
    lane = {
      requests = 0, tokens = 0, input = 0, weight = 0, virtual = 0, owed = 0,
      tenants = {}, ahead = {}, ready = {}, parked = {},
    }
    line.lanes[op[9]] = lane
  end
  lane.queue_requests, lane.queue_tokens, lane.floor, lane.limit = op[19], op[20], op[21], op[10]
  local name, weight = op[3], op[18]
  local tenant = lane.tenants[name]
  if not tenant then
    local finish = lane.ahead[name]
    lane.ahead[name] = nil
    tenant = {
      weight = weight, start = finish and max(lane.virtual, finish) or lane.virtual,
      tokens = 0, input = 0, requests = 0, parked = false, oldest = ticket.at,
    }
    lane.tenants[name] = tenant
    lane.weight = lane.weight + weight
    place_in(lane.ready, lane.tenants, 'start', name)
  elseif tenant.weight ~= weight then
    lane.weight = lane.weight + weight - tenant.weight
    tenant.weight = weight
  end
  local list, field = list_of(op)
  insert(list, list_position(list, ticket), { ticket.deadline_at, ticket.sequence, op[2], ticket.at })
  tenant.oldest = min(tenant.oldest, ticket.at)
  lists_changed[field] = true
  for _, part in ipairs({ tenant, lane }) do
    part.requests = part.requests + 1
    part.tokens = part.tokens + ticket.tokens
    part.input = part.input + op[12]
  end
  lines_changed[line.name] = true
end

function line_remove(line, ticket)
  local op = ticket.op
  local lane, name = line.lanes[op[9]], op[3]
  local tenant = lane.tenants[name]
  local list, field = list_of(op)
  remove(list, list_position(list, ticket))
  lists_changed[field] = true
  lines_changed[line.name] = true
  for _, part in ipairs({ tenant, lane }) do
    part.requests = part.requests - 1
    part.tokens = part.tokens - ticket.tokens
    part.input = part.input - op[12]
  end
  if tenant.requests > 0 then
    if ticket.at <= tenant.oldest then
      tenant.oldest = list[1][4]
      for position = 2, #list do tenant.oldest = min(tenant.oldest, list[position][4]) end
    end
    return
  end
  take_out(lane, name, tenant)
  lane.tenants[name] = nil
  lane.weight = lane.weight - tenant.weight
  if tenant.start > lane.virtual then lane.ahead[name] = tenant.start end
  if lane.requests == 0 then
    lane.virtual = 0
    lane.ahead = {}
    lane.owed = min(lane.owed, 0)
  end
end

local function charge_line(lane, ticket, in_turn)
  local name = ticket.op[3]
  local tenant = lane.tenants[name]
  take_out(lane, name, tenant)
  if in_turn and tenant.start > lane.virtual then
    lane.virtual = tenant.start
    for other, finish in pairs(lane.ahead) do
      if finish <= lane.virtual then lane.ahead[other] = nil end
    end
  end
  tenant.start = tenant.start + virtual_cost(ticket.tokens, tenant.weight)
  place_in(lane.ready, lane.tenants, 'start', name)
end

local function park(lane, name, until_ms)
  local tenant = lane.tenants[name]
  take_out(lane, name, tenant)
  tenant.parked = until_ms
  place_in(lane.parked, lane.tenants, 'parked', name)
end

local function unpark(lane, name)
  local tenant = lane.tenants[name]
  if not tenant or not tenant.parked then return false end
  take_out(lane, name, tenant)
  tenant.start = max(tenant.start, lane.virtual)
  place_in(lane.ready, lane.tenants, 'start', name)
  return true
end

-- The line -----------------------------------------------------------------------------------------------

function line_unpark(line, tenant)
  local any = false
  for _, lane in pairs(line.lanes) do
    if unpark(lane, tenant) then
      any = true
      lines_changed[line.name] = true
    end
  end
  return any
end

function line_is_empty(line)
  for _, lane in pairs(line.lanes) do
    if lane.requests > 0 then return false end
  end
  return true
end

-- returns {tickets that must leave}, or nil when the lane is full for the newcomer
function pushed_out_by(line, newcomer)
  local op = newcomer.op
  local lane = line.lanes[op[9]]
  local excess_requests = lane.requests - lane.queue_requests
  local excess_tokens = lane.tokens - lane.queue_tokens
  if excess_requests <= 0 and excess_tokens <= 0 then return {} end
  local own = lane.tenants[op[3]]
  local own_share = virtual_cost(own.tokens, own.weight)
  local share, name = -1, nil
  for other, tenant in pairs(lane.tenants) do
    local its = virtual_cost(tenant.tokens, tenant.weight)
    if its > share or (its == share and before(name, other)) then share, name = its, other end
  end
  local tenant, list = lane.tenants[name], list_in(line, op[9], name)
  local pushed = {}
  for position = #list, max(1, #list - PUSHED_OUT_AT_ONCE + 1), -1 do
    if share <= own_share then return nil end
    local ticket = ticket_of(list[position][3])
    pushed[#pushed + 1] = ticket
    share = share - virtual_cost(ticket.tokens, tenant.weight)
    excess_requests = excess_requests - 1
    excess_tokens = excess_tokens - ticket.tokens
    if excess_requests <= 0 and excess_tokens <= 0 then return pushed end
  end
  return nil
end

-- As much of a whole as `part` tokens of it, each amount rounded up.
local function part_of(requests, tokens, input, part)
  if part >= tokens or tokens == 0 then return requests, tokens, input end
  return ceil(requests * part / tokens), part, ceil(input * part / tokens)
end

-- returns requests, tokens, input tokens that may go before this ticket, which is in the line
function ahead_of(line, ticket)
  local op = ticket.op
  local requests, tokens, input = 0, 0, 0
  local more_requests, more_tokens, more_input
  local rank = 1
  while LANES[rank] ~= op[9] do
    local lane = line.lanes[LANES[rank]]
    if lane then
      requests, tokens, input = requests + lane.requests, tokens + lane.tokens, input + lane.input
    end
    rank = rank + 1
  end
  local lane = line.lanes[op[9]]
  local own = lane.tenants[op[3]]
  more_requests, more_tokens, more_input = part_of(
    lane.requests - own.requests, lane.tokens - own.tokens, lane.input - own.input,
    ceil(own.tokens * (lane.weight - own.weight) / own.weight)
  )
  requests = requests + own.requests - 1 + more_requests
  tokens = tokens + own.tokens - ticket.tokens + more_tokens
  input = input + own.input - op[12] + more_input
  for below = rank + 1, #LANES do
    lane = line.lanes[LANES[below]]
    if lane and lane.requests > 0 and lane.floor > 0 then
      local share = min(lane.floor, 999)
      more_requests, more_tokens, more_input = part_of(
        lane.requests, lane.tokens, lane.input, ceil((tokens + ticket.tokens) * share / (1000 - share))
      )
      requests, tokens, input = requests + more_requests, tokens + more_tokens, input + more_input
    end
  end
  return requests, tokens, input
end

local function wake_by(line, at)
  if at and (not line.wake or at < line.wake) then line.wake = at end
end

local function next_lane(line, blocked)
  local first, most_owed = nil, 0
  for _, name in ipairs(LANES) do
    local lane = line.lanes[name]
    if lane and lane.ready[1] and not blocked[name] then
      if lane.owed > most_owed then
        first, most_owed = name, lane.owed
      elseif not first then
        first = name
      end
    end
  end
  return first
end

local function let_go(line, ticket, blocked, in_turn)
  local name = ticket.op[9]
  local lane, tokens = line.lanes[name], ticket.tokens
  charge_line(lane, ticket, in_turn)
  local beyond = tokens * (1000 - lane.floor)
  lane.owed = max(lane.owed - beyond, -max(beyond, usable_tokens(line.pool) * lane.floor))
  for other_name, other in pairs(line.lanes) do
    if other ~= lane and other.ready[1] and not blocked[other_name] then
      other.owed = other.owed + tokens * other.floor
    end
  end
  line_remove(line, ticket)
end

-- The next tickets in order behind `head`, a few of each tenant, from the highest lane down.
local function behind(line, head, blocked)
  local found = {}
  for _, name in ipairs(LANES) do
    local lane = line.lanes[name]
    if lane and not blocked[name] then
      for position = 1, min(LOOKED_AT, #lane.ready) do
        local list = list_in(line, name, lane.ready[position])
        for place = 1, min(LOOKED_AT_PER_TENANT + 1, #list) do
          local ticket = ticket_of(list[place][3])
          if ticket ~= head then found[#found + 1] = ticket end
        end
        if #found >= LOOKED_AT then break end
      end
    end
  end
  for position = #found, LOOKED_AT + 1, -1 do found[position] = nil end
  return found
end

local function let_pass(line, head, blocked, attempt)
  local head_lane = head.op[9]
  local head_tenant = line.lanes[head_lane].tenants[head.op[3]]
  local latest = head_tenant.start + virtual_cost(head.tokens, head_tenant.weight)
  for _, ticket in ipairs(behind(line, head, blocked)) do
    local op = ticket.op
    local name = op[9]
    local lane = line.lanes[name]
    local tenant = lane.tenants[op[3]]
    if not blocked[name] and tenant and not tenant.parked and op[17] > 0
      and ticket.tokens * PASSES_IN_SIZE <= head.tokens
      and head.passed + ticket.tokens <= head.tokens
      and (name ~= head_lane or tenant.start + virtual_cost(ticket.tokens, tenant.weight) <= latest) then
      local outlook, wake = attempt(ticket, line)
      if outlook == GRANTED then
        head.passed = head.passed + ticket.tokens
        tickets_changed[head.op[2]] = true
        let_go(line, ticket, blocked, false)
      elseif outlook == GONE then
        line_remove(line, ticket)
      elseif outlook == TENANT then
        if tenant ~= head_tenant then park(lane, op[3], wake or NEVER_MS) end
      elseif outlook == LANE then
        blocked[name] = true
        wake_by(line, wake)
      else
        wake_by(line, wake)
      end
    end
  end
end

-- Let go whoever can, in order, in at most `most` steps. True when there may be more to do.
function line_promote(line, attempt, most)
  lines_changed[line.name] = true
  line.wake = false
  for _, lane in pairs(line.lanes) do
    while lane.parked[1] and lane.tenants[lane.parked[1]].parked <= now do unpark(lane, lane.parked[1]) end
  end
  local blocked, head, steps = {}, nil, 0
  while true do
    if steps == most then return next_lane(line, blocked) ~= nil end
    local name = next_lane(line, blocked)
    if not name then break end
    steps = steps + 1
    local lane = line.lanes[name]
    local tenant = lane.ready[1]
    local ticket = ticket_of(list_in(line, name, tenant)[1][3])
    local outlook, wake = attempt(ticket, line)
    if outlook == GRANTED then
      let_go(line, ticket, blocked, true)
    elseif outlook == GONE then
      line_remove(line, ticket)
    elseif outlook == TENANT then
      park(lane, tenant, wake or NEVER_MS)
    elseif outlook == LANE then
      blocked[name] = true
      wake_by(line, wake)
    else
      head = ticket
      wake_by(line, wake)
      break
    end
  end
  if head then let_pass(line, head, blocked, attempt) end
  for _, lane in pairs(line.lanes) do
    local first = lane.parked[1] and lane.tenants[lane.parked[1]].parked
    if first and first < NEVER_MS then wake_by(line, first) end
  end
  return false
end

-- Writing ------------------------------------------------------------------------------------------------

local function lane_to(lane)
  local tenants = {}
  for name, one in pairs(lane.tenants) do
    tenants[name] = { one.weight, one.start, one.tokens, one.input, one.requests, one.parked, one.oldest }
  end
  return {
    lane.queue_requests, lane.queue_tokens, lane.floor, lane.requests, lane.tokens, lane.input, lane.weight,
    lane.virtual, lane.owed, tenants, lane.ahead, lane.limit,
  }
end

-- returns fields and values to set, fields to delete
function waits_written()
  local sets, deletes = {}, {}
  local function set(field, value)
    if value == nil then
      deletes[#deletes + 1] = field
    else
      sets[#sets + 1] = field
      sets[#sets + 1] = pack(value)
    end
  end
  for name in pairs(lines_changed) do
    local line, value = lines[name], nil
    if line then
      local lanes = {}
      for lane, one in pairs(line.lanes) do lanes[lane] = lane_to(one) end
      value = { line.pool, line.wake, lanes }
    end
    set('P' .. name, value)
  end
  for field in pairs(lists_changed) do
    local list = lists[field]
    set(field, list[1] and list or nil)
  end
  for lease_id in pairs(tickets_changed) do
    local one, value = tickets[lease_id], nil
    if one and not one.fresh then
      local op = {}
      for position = 1, #one.op do op[position] = one.op[position] end
      value = {
        op, one.tokens, one.who, one.sequence, one.at, one.expires_at, one.deadline_at, one.passed, one.behind,
      }
    end
    set('Q' .. lease_id, value)
  end
  for name in pairs(news_changed) do
    local told = news[name]
    set('N' .. name, told[1] and told or nil)
  end
  if index_changed then set('I', index) end
  return sets, deletes
end

end
