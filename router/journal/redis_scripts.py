"""The Redis journal's Lua scripts.

``KEYS``: the session's hash, its tokens, its open turn's tokens, the tenant's set of sessions. A script
returns 0 first, or an error's code and message.
"""

COMMON = """
local id, hash, tokens, turn_tokens, all = ARGV[1], KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local function row()
  local r = redis.call('HMGET', hash, 'tenant', 'worker', 'epoch', 'turns', 'released', 'turn', 'keep', 'router')
  if not r[1] then return nil, {'session_not_found', 'session ' .. id .. ' does not exist'} end
  return {tenant=r[1], worker=r[2], epoch=tonumber(r[3]), turns=tonumber(r[4]), released=r[5] == '1', turn=r[6],
          keep=tonumber(r[7]), router=r[8]}
end
local function of_tenant(tenant, dead_too)
  local r, err = row()
  if not r then return nil, err end
  if r.tenant ~= tenant then return nil, {'session_not_found', 'session ' .. id .. ' does not exist'} end
  if r.released and not dead_too then return nil, {'session_released', 'session ' .. id .. ' was released'} end
  return r
end
local function fenced(epoch)
  local r, err = row()
  if not r then return nil, err end
  if r.released then return nil, {'session_released', 'session ' .. id .. ' was released'} end
  if r.epoch ~= tonumber(epoch) then
    return nil, {'stale_epoch', 'session ' .. id .. ' is at epoch ' .. r.epoch .. ', epoch ' .. epoch .. ' has passed'}
  end
  return r
end
local function of_turn(epoch, turn)
  local r, err = fenced(epoch)
  if not r then return nil, err end
  if r.turn ~= turn then
    return nil, {'stale_epoch', 'turn ' .. turn .. ' is not the running turn of session ' .. id}
  end
  return r
end
local function busy() return {'session_busy', 'session ' .. id .. ' already has an active request'} end
local function forget_turn()
  redis.call('DEL', turn_tokens)
  redis.call('HSET', hash, 'turn', '')
end
local function cut(keep)
  if redis.call('STRLEN', tokens) <= 4 * keep then return end
  if keep == 0 then redis.call('DEL', tokens)
  else redis.call('SET', tokens, redis.call('GETRANGE', tokens, 0, 4 * keep - 1)) end
end
local function full(max)
  local count = redis.call('SCARD', all)
  if count >= tonumber(max) then
    return {'too_many_sessions', count .. ' of your sessions are open, which is the limit; release some'}
  end
end
local function make(tenant, worker, epoch, router)
  redis.call('HSET', hash, 'tenant', tenant, 'worker', worker, 'epoch', epoch, 'turns', 0, 'released', 0,
             'turn', '', 'keep', 0, 'router', router, 'last', '')
  redis.call('SADD', all, id)
end
local function record(r) return {0, r.worker, r.epoch, r.turns, redis.call('GET', tokens) or ''} end
-- Make the session this router's. A turn that the previous router left open stays.
local function own(r, router, lease)
  if r.router == router then return nil end
  if r.turn ~= '' and redis.call('EXISTS', lease .. r.router) == 1 then return busy() end
  r.epoch = r.epoch + 1
  redis.call('HSET', hash, 'router', router, 'epoch', r.epoch)
end
"""

SCRIPTS = {
    "take": """
local tenant, router, lease, create = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if create == '1' and redis.call('EXISTS', hash) == 0 then
  if full(ARGV[6]) then return full(ARGV[6]) end
  make(tenant, '', 0, router)
end
if create == '1' and redis.call('HGET', hash, 'tenant') ~= tenant then
  return {'session_exists', 'session ' .. id .. " belongs to another tenant; choose another id"}
end
local r, err = of_tenant(tenant)
if not r then return err end
err = own(r, router, lease)
if err then return err end
if r.turn ~= '' then forget_turn() end
return record(r)
""",
    "adopt": """
local tenant, router, lease, turn = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local r, err = of_tenant(tenant)
if not r then return err end
local t = redis.call('HMGET', hash, 'prompt', 'request', 'last', 'last_prompt', 'last_finish')
if turn == '' or (turn ~= r.turn and turn ~= t[3]) then
  return {'turn_not_found', 'turn ' .. turn .. ' is neither running on session ' .. id .. ' nor its last'}
end
err = own(r, router, lease)
if err then return err end
local answer = record(r)
if turn == t[3] then
  for _, value in ipairs({t[4], t[4], '', r.turn == '' and t[2] or '', t[5]}) do table.insert(answer, value) end
else
  for _, value in ipairs({r.keep, t[1], redis.call('GET', turn_tokens) or '', t[2], ''}) do
    table.insert(answer, value)
  end
end
return answer
""",
    "load": """
local r, err = of_tenant(ARGV[2])
if not r then return err end
return record(r)
""",
    "pin": """
local r, err = fenced(ARGV[2])
if not r then return err end
redis.call('HSET', hash, 'worker', ARGV[3], 'epoch', r.epoch + 1)
return {0, r.epoch + 1}
""",
    "move": """
local r, err = fenced(ARGV[2])
if not r then return err end
if r.turn ~= '' then return busy() end
redis.call('HSET', hash, 'worker', ARGV[3], 'epoch', r.epoch + 1)
return {0, r.epoch + 1}
""",
    "begin": """
local r, err = fenced(ARGV[2])
if not r then return err end
if r.turn ~= '' then return busy() end
redis.call('HSET', hash, 'turn', ARGV[3], 'keep', ARGV[4], 'prompt', tonumber(ARGV[4]) + #ARGV[5] / 4,
           'request', ARGV[6])
redis.call('SET', turn_tokens, ARGV[5])
return {0}
""",
    "append": """
local r, err = of_turn(ARGV[2], ARGV[3])
if not r then return err end
local at, have = 4 * (tonumber(ARGV[4]) - r.keep), redis.call('STRLEN', turn_tokens)
if at == have then
  redis.call('APPEND', turn_tokens, ARGV[5])
  return {0}
end
-- A retry, after an answer that was lost.
if at >= 0 and redis.call('GETRANGE', turn_tokens, at, at + #ARGV[5] - 1) == ARGV[5] then return {0} end
return {'stale_epoch', 'position ' .. ARGV[4] .. ' of session ' .. id .. ' has other tokens'}
""",
    "complete": """
local r, err = of_turn(ARGV[2], ARGV[3])
if not r then return err end
cut(r.keep)
local added = redis.call('GET', turn_tokens)
if added and #added > 0 then redis.call('APPEND', tokens, added) end
redis.call('HINCRBY', hash, 'turns', 1)
redis.call('HSET', hash, 'last', r.turn, 'last_prompt', redis.call('HGET', hash, 'prompt'), 'last_finish', ARGV[4])
forget_turn()
return {0}
""",
    "abort": """
local r, err = row()
if not r then return err end
if r.turn ~= ARGV[2] or r.router ~= ARGV[3] then return {0, 0} end
forget_turn()
return {0, 1}
""",
    "leave": """
local r, err = row()
if not r then return err end
if r.turn == ARGV[2] and r.router == ARGV[3] then redis.call('HSET', hash, 'router', '') end
return {0}
""",
    "cut": """
local r, err = fenced(ARGV[2])
if not r then return err end
if r.turn ~= '' then return busy() end
cut(tonumber(ARGV[3]))
redis.call('HSET', hash, 'last', '')
return {0}
""",
    # Runs on the child; KEYS[5] and KEYS[6] are the parent's hash and tokens.
    "fork": """
local tenant, parent, router, at = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local child, child_hash = id, hash
id, hash = parent, KEYS[5]
local p, err = of_tenant(tenant)
if not p then return err end
id, hash = child, child_hash
local known = redis.call('GET', KEYS[6]) or ''
local len = at == '' and #known / 4 or tonumber(at)
if len < 0 or 4 * len > #known then
  return {'invalid_request', 'session ' .. parent .. ' has ' .. #known / 4 .. ' tokens, cannot fork it at ' .. len}
end
if redis.call('EXISTS', hash) == 1 then
  return {'session_exists', 'session ' .. id .. ' exists already'}
end
if full(ARGV[6]) then return full(ARGV[6]) end
make(tenant, p.worker, 1, router)
if len > 0 then redis.call('SET', tokens, string.sub(known, 1, 4 * len)) end
return {0, p.worker, 1, 0, string.sub(known, 1, 4 * len)}
""",
    # KEYS[5] and KEYS[6] are the tenant's objects and their keys.
    "put": """
local r, err = fenced(ARGV[2])
if not r then return err end
for i = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1])
  redis.call('ZADD', KEYS[6], 0, ARGV[i])
end
return {0}
""",
    "release": """
local r, err = of_tenant(ARGV[2], true)
if not r then return err end
if not r.released then
  r.epoch = r.epoch + 1
  redis.call('HSET', hash, 'released', 1, 'epoch', r.epoch)
  redis.call('PEXPIRE', hash, ARGV[3])
  redis.call('DEL', tokens)
  redis.call('SREM', all, id)
  forget_turn()
end
return {0, r.worker, r.epoch, r.turns, ''}
""",
}
