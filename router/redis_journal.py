"""The journal in Redis: for routers of many machines.

A session is a hash and two strings of token bytes: the session as of its last good turn, and what its
running turn adds. Each write is one Lua script, which Redis runs alone: it compares the epoch, then
sets. A router's lease is a key that expires by Redis's own clock.

Not for Redis Cluster: a script reads the session's keys and a router's lease.
"""

from __future__ import annotations

import asyncio
import uuid
from array import array
from typing import Any

from redis.asyncio import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from holdfast.errors import ConfigError, JournalUnavailable
from holdfast.tokens import pack_tokens, unpack_tokens
from holdfast.wire import error_from_code
from router.journal import (
    BEATS_PER_LEASE,
    MAX_SESSIONS_PER_TENANT,
    ROUTER_LEASE_S,
    TOMBSTONE_RETENTION_S,
    SessionRecord,
    TurnRecord,
)

TIMEOUT_S = 5.0
"""For a connection and for an answer: a Redis that does not answer is one that went away."""
PREFIX = "holdfast:"
LEASE = f"{PREFIX}router:"

# KEYS: the session's hash, its tokens, its turn's tokens, the tenant's set of sessions.
# What a script returns first is 0, or an error's code.
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
    return {'too_many_sessions', count .. ' of your sessions are open, no more may be; release some'}
  end
end
local function make(tenant, worker, epoch, router)
  redis.call('HSET', hash, 'tenant', tenant, 'worker', worker, 'epoch', epoch, 'turns', 0, 'released', 0,
             'turn', '', 'keep', 0, 'router', router, 'last', '')
  redis.call('SADD', all, id)
end
local function record(r) return {0, r.worker, r.epoch, r.turns, redis.call('GET', tokens) or ''} end
-- The session becomes this router's; a turn that the one before left open is still there.
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
  return {'session_exists', 'session ' .. id .. " is somebody else's; choose another id"}
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
  return {'turn_not_found', 'turn ' .. turn .. ' neither runs on session ' .. id .. ' nor is its last'}
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
-- Said again, after an answer that was lost.
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
    # Of the child; KEYS[5] and KEYS[6] are the parent's hash and tokens.
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
  return {'session_exists', 'session ' .. id .. ' is there already'}
end
if full(ARGV[6]) then return full(ARGV[6]) end
make(tenant, p.worker, 1, router)
if len > 0 then redis.call('SET', tokens, string.sub(known, 1, 4 * len)) end
return {0, p.worker, 1, 0, string.sub(known, 1, 4 * len)}
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


class RedisJournal:
    """See ``Journal``. What the server's append-only file must be is checked at the start:
    on for ``process``, and synced at every write for ``power``."""

    def __init__(
        self,
        url: str,
        durability: str,
        lease_s: float = ROUTER_LEASE_S,
        max_sessions: int = MAX_SESSIONS_PER_TENANT,
        tombstone_retention_s: float = TOMBSTONE_RETENTION_S,
    ) -> None:
        if durability not in ("process", "power"):
            raise ConfigError(f"journal_durability: {durability!r} is not one of process, power")
        self.router = uuid.uuid4().hex
        self._url = url
        self._durability = durability
        self._lease_s = lease_s
        self._max_sessions = max_sessions
        self._retention_s = tombstone_retention_s
        try:
            # A write that was sent is not sent again behind our back: its answer decides.
            self._redis = Redis.from_url(
                url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
            )
        except ValueError as error:
            raise ConfigError(f"journal_url: {error}") from None
        self._scripts = {name: self._redis.register_script(COMMON + text) for name, text in SCRIPTS.items()}
        self._beats: asyncio.Task[None] | None = None

    async def start(self) -> None:
        try:
            config = await self._redis.config_get("append*")
        except ResponseError:
            config = {}  # a managed Redis hides it; its operator answers for it
        except (RedisError, OSError) as error:
            raise ConfigError(f"journal_url: no Redis answers at {self._url}: {error}") from None
        if config and config.get("appendonly") != "yes":
            raise ConfigError("journal_url: this Redis forgets at its death; it needs appendonly yes")
        if config and self._durability == "power" and config.get("appendfsync") != "always":
            raise ConfigError("journal_durability: power needs a Redis with appendfsync always")
        await self._beat()
        self._beats = asyncio.create_task(self._keep_lease())

    async def close(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
            await asyncio.gather(self._redis.delete(self._lease_key()), return_exceptions=True)
        await self._redis.aclose()

    # ---- the interface ----------------------------------------------------------------------------

    async def take(self, session_id: str, tenant: str, *, create: bool) -> SessionRecord:
        answer = await self._run(
            "take", session_id, tenant, tenant, self.router, LEASE, int(create), self._max_sessions
        )
        return _record(session_id, tenant, answer)

    async def adopt_turn(self, session_id: str, tenant: str, turn_id: str) -> TurnRecord:
        answer = await self._run("adopt", session_id, tenant, tenant, self.router, LEASE, turn_id)
        keep_len, prompt_len, tokens, request, finish = answer[5:]
        record = _record(session_id, tenant, answer[:5])
        ids = unpack_tokens(tokens) if not finish else record.tokens[int(keep_len) :]
        return TurnRecord(record, int(keep_len), int(prompt_len), ids, request, finish.decode())

    async def load(self, session_id: str, tenant: str) -> SessionRecord:
        return _record(session_id, tenant, await self._run("load", session_id, tenant, tenant))

    async def pin(self, session_id: str, epoch: int, worker: str) -> int:
        return int((await self._run("pin", session_id, "", epoch, worker))[1])

    async def move(self, session_id: str, epoch: int, worker: str) -> int:
        return int((await self._run("move", session_id, "", epoch, worker))[1])

    async def begin_turn(
        self, session_id: str, epoch: int, turn_id: str, keep_len: int, ids: array[int], request: bytes
    ) -> None:
        await self._run("begin", session_id, "", epoch, turn_id, keep_len, pack_tokens(ids), request)

    async def append(self, session_id: str, epoch: int, turn_id: str, start: int, ids: list[int]) -> None:
        await self._run("append", session_id, "", epoch, turn_id, start, pack_tokens(array("i", ids)))

    async def complete_turn(self, session_id: str, epoch: int, turn_id: str, finish: str) -> None:
        await self._run("complete", session_id, "", epoch, turn_id, finish)

    async def abort_turn(self, session_id: str, turn_id: str) -> bool:
        return bool((await self._run("abort", session_id, "", turn_id, self.router))[1])

    async def leave_turn(self, session_id: str, turn_id: str) -> None:
        await self._run("leave", session_id, "", turn_id, self.router)

    async def cut(self, session_id: str, epoch: int, keep_len: int) -> None:
        await self._run("cut", session_id, "", epoch, keep_len)

    async def fork(self, parent_id: str, tenant: str, child_id: str, at_len: int | None) -> SessionRecord:
        at = "" if at_len is None else at_len
        parent = _keys(parent_id, tenant)[:2]
        answer = await self._run(
            "fork", child_id, tenant, tenant, parent_id, self.router, at, self._max_sessions, more_keys=parent
        )
        return _record(child_id, tenant, answer)

    async def release(self, session_id: str, tenant: str) -> SessionRecord:
        return _record(
            session_id, tenant, await self._run("release", session_id, tenant, tenant, round(1000 * self._retention_s))
        )

    async def owners(self, session_ids: list[str]) -> dict[str, tuple[str, int]]:
        answers = await self._ask(
            *(("HMGET", _keys(session_id, "")[0], "worker", "epoch", "released") for session_id in session_ids)
        )
        return {
            session_id: (worker.decode(), int(epoch))
            for session_id, (worker, epoch, released) in zip(session_ids, answers, strict=True)
            if worker is not None and released == b"0"
        }

    async def put_objects(self, tenant: str, objects: dict[str, bytes]) -> None:
        values, keys = _objects(tenant)
        # A sorted set of equal scores is sorted by name.
        await self._ask(
            ("HSET", values, *(part for pair in objects.items() for part in pair)),
            ("ZADD", keys, *(part for key in objects for part in (0, key))),
        )

    async def get_object(self, tenant: str, key: str) -> bytes | None:
        value: bytes | None = (await self._ask(("HGET", _objects(tenant)[0], key)))[0]
        return value

    async def list_objects(self, tenant: str, prefix: str) -> list[tuple[str, bytes]]:
        values, all_keys = _objects(tenant)
        keys = (await self._ask(("ZRANGEBYLEX", all_keys, f"[{prefix}", b"(" + prefix.encode() + b"\xff")))[0]
        found = (await self._ask(("HMGET", values, *keys)))[0] if keys else []
        return [(key.decode(), value) for key, value in zip(keys, found, strict=True) if value is not None]

    async def delete_objects(self, tenant: str, keys: list[str]) -> None:
        values, all_keys = _objects(tenant)
        await self._ask(("HDEL", values, *keys), ("ZREM", all_keys, *keys))

    async def list_sessions(self, tenant: str) -> list[tuple[SessionRecord, int, bool]]:
        names = sorted(name.decode() for name in (await self._ask(("SMEMBERS", f"{PREFIX}tenant:{tenant}")))[0])
        keys = [_keys(name, tenant) for name in names]
        sessions = await self._ask(*(("HMGET", hash_key, "worker", "epoch", "turns", "turn") for hash_key, *_ in keys))
        sizes = await self._ask(*(("STRLEN", tokens) for _, tokens, *_ in keys))
        listed = []
        for name, (worker, epoch, turns, turn), size in zip(names, sessions, sizes, strict=True):
            if worker is not None:
                record = SessionRecord(name, tenant, worker.decode(), int(epoch), int(turns))
                listed.append((record, size // 4, bool(turn)))
        return listed

    # ---- inside -----------------------------------------------------------------------------------

    async def _ask(self, *commands: tuple[Any, ...]) -> list[Any]:
        """The answers to commands that are done together."""
        try:
            async with self._redis.pipeline(transaction=True) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = await pipeline.execute()
        except (RedisError, OSError) as error:
            raise JournalUnavailable(f"the journal does not answer: {error}") from None
        return answers

    async def _run(self, name: str, session_id: str, tenant: str, *args: Any, more_keys: tuple[str, ...] = ()) -> Any:
        try:
            keys = (*_keys(session_id, tenant), *more_keys)
            answer = await self._scripts[name](keys=keys, args=(session_id, *args))
        except (RedisError, OSError) as error:
            raise JournalUnavailable(f"the journal cannot be written: {error}") from None
        if answer[0] != 0:
            raise error_from_code(answer[0].decode(), answer[1].decode())
        return answer

    def _lease_key(self) -> str:
        return LEASE + self.router

    async def _beat(self) -> None:
        await self._redis.set(self._lease_key(), 1, px=int(1000 * self._lease_s))

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)
            await asyncio.gather(self._beat(), return_exceptions=True)  # the turns say what is wrong


def _keys(session_id: str, tenant: str) -> tuple[str, ...]:
    # A session's name comes last: whatever its client calls it, it is no other key of another session.
    kinds = ("state", "tokens", "turn")
    return (*(f"{PREFIX}{kind}:{session_id}" for kind in kinds), f"{PREFIX}tenant:{tenant}")


def _objects(tenant: str) -> tuple[str, str]:
    return (f"{PREFIX}objects:{tenant}", f"{PREFIX}object-keys:{tenant}")


def _record(session_id: str, tenant: str, answer: list[Any]) -> SessionRecord:
    _, worker, epoch, num_turns, tokens = answer
    return SessionRecord(session_id, tenant, worker.decode(), int(epoch), int(num_turns), unpack_tokens(tokens))
