"""The journal in Redis, for routers on many machines.

A session is a hash and two strings of token bytes: the session as of its last good turn, and what its
open turn adds. Each write is one Lua script, which Redis runs atomically: it compares the epoch, then
writes. A router's lease is a key that expires by Redis's clock.

Redis Cluster is not supported: scripts read a session's keys together with a router's lease.
"""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from holdfast.errors import ConfigError, JournalUnavailable
from holdfast.tokens import pack_tokens, unpack_tokens
from holdfast.wire import error_from_code
from router.journal.interface import (
    BEATS_PER_LEASE,
    MAX_SESSIONS_PER_TENANT,
    ROUTER_LEASE_S,
    TOMBSTONE_RETENTION_S,
    Fence,
    Owner,
    SessionRecord,
    TurnRecord,
    check_durability,
)
from router.journal.redis_scripts import COMMON, SCRIPTS

T = TypeVar("T")
TIMEOUT_S = 5.0
"""Deadline of a connection attempt and of an answer."""
PREFIX = "holdfast:"
LEASE = f"{PREFIX}router:"
VERSION, VERSION_KEY = 1, f"{PREFIX}version"
"""Of the records."""


class RedisJournal:
    """See ``Journal``. ``start`` checks the server's append-only file: it must be on, and for durability
    ``power`` be synced at every write."""

    def __init__(
        self,
        url: str,
        durability: str,
        lease_s: float = ROUTER_LEASE_S,
        max_sessions: Callable[[str], int] = lambda tenant: MAX_SESSIONS_PER_TENANT,
        tombstone_retention_s: float = TOMBSTONE_RETENTION_S,
    ) -> None:
        check_durability(durability)
        self.router = uuid.uuid4().hex
        self._url = url
        self._durability = durability
        self._lease_s = lease_s
        self._max_sessions = max_sessions
        self._retention_s = tombstone_retention_s
        try:
            # No automatic retries: whether a write was applied must come from its own answer.
            self._redis = Redis.from_url(
                url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
            )
        except ValueError as error:
            raise ConfigError(f"journal_url: {error}") from None
        self._scripts = {name: self._redis.register_script(COMMON + text) for name, text in SCRIPTS.items()}
        self._beats: asyncio.Task[None] | None = None
        self._commands: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        try:
            config = await self._redis.config_get("append*")
        except ResponseError:
            config = {}  # a managed Redis hides its configuration
        except (RedisError, OSError) as error:
            raise ConfigError(f"journal_url: no Redis answers at {self._url}: {error}") from None
        if config and config.get("appendonly") != "yes":
            raise ConfigError("journal_url: this Redis does not persist its writes; set appendonly yes")
        if config and self._durability == "power" and config.get("appendfsync") != "always":
            raise ConfigError("journal_durability: power needs a Redis with appendfsync always")
        await self._check_version()
        await self._renew_lease()
        self._beats = asyncio.create_task(self._keep_lease())

    async def _check_version(self) -> None:
        _, found = await self._execute(("SET", VERSION_KEY, VERSION, "NX"), ("GET", VERSION_KEY))
        if int(found) != VERSION:
            raise ConfigError(
                f"journal_url: the journal there is of another version of Holdfast ({int(found)}, not {VERSION}); name "
                "another database"
            )

    async def close(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
            await asyncio.gather(self._redis.delete(self._lease_key()), return_exceptions=True)
        self._closed = True
        await asyncio.gather(*self._commands, return_exceptions=True)
        await self._redis.aclose()

    # ---- the interface ----------------------------------------------------------------------------

    async def take(self, session_id: str, tenant: str, *, create: bool) -> SessionRecord:
        answer = await self._run(
            "take", session_id, tenant, tenant, self.router, LEASE, int(create), self._max_sessions(tenant)
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
            "fork", child_id, tenant, tenant, parent_id, self.router, at, self._max_sessions(tenant), more_keys=parent
        )
        return _record(child_id, tenant, answer)

    async def release(self, session_id: str, tenant: str) -> SessionRecord:
        return _record(
            session_id, tenant, await self._run("release", session_id, tenant, tenant, round(1000 * self._retention_s))
        )

    async def owners(self, session_ids: list[str]) -> dict[str, Owner]:
        answers = await self._execute(
            *(("HMGET", _keys(session_id, "")[0], "worker", "epoch", "released") for session_id in session_ids)
        )
        return {
            session_id: Owner(worker.decode(), int(epoch), released != b"0")
            for session_id, (worker, epoch, released) in zip(session_ids, answers, strict=True)
            if worker is not None
        }

    async def put_objects(self, tenant: str, objects: dict[str, bytes], fence: Fence | None = None) -> None:
        values, keys = _objects(tenant)
        if fence is not None:
            pairs = (part for pair in objects.items() for part in pair)
            await self._run("put", fence.session_id, tenant, fence.epoch, *pairs, more_keys=(values, keys))
            return
        # A sorted set with equal scores is ordered by name.
        await self._execute(
            ("HSET", values, *(part for pair in objects.items() for part in pair)),
            ("ZADD", keys, *(part for key in objects for part in (0, key))),
        )

    async def get_object(self, tenant: str, key: str) -> bytes | None:
        value: bytes | None = (await self._execute(("HGET", _objects(tenant)[0], key)))[0]
        return value

    async def list_objects(self, tenant: str, prefix: str) -> list[tuple[str, bytes]]:
        values, all_keys = _objects(tenant)
        keys = (await self._execute(("ZRANGEBYLEX", all_keys, f"[{prefix}", b"(" + prefix.encode() + b"\xff")))[0]
        found = (await self._execute(("HMGET", values, *keys)))[0] if keys else []
        return [(key.decode(), value) for key, value in zip(keys, found, strict=True) if value is not None]

    async def delete_objects(self, tenant: str, keys: list[str]) -> None:
        values, all_keys = _objects(tenant)
        await self._execute(("HDEL", values, *keys), ("ZREM", all_keys, *keys))

    async def list_sessions(self, tenant: str) -> list[tuple[SessionRecord, int, bool]]:
        names = sorted(name.decode() for name in (await self._execute(("SMEMBERS", f"{PREFIX}tenant:{tenant}")))[0])
        keys = [_keys(name, tenant) for name in names]
        sessions = await self._execute(
            *(("HMGET", hash_key, "worker", "epoch", "turns", "turn") for hash_key, *_ in keys)
        )
        sizes = await self._execute(*(("STRLEN", tokens) for _, tokens, *_ in keys))
        listed = []
        for name, (worker, epoch, turns, turn), size in zip(names, sessions, sizes, strict=True):
            if worker is not None:
                record = SessionRecord(name, tenant, worker.decode(), int(epoch), int(turns))
                listed.append((record, size // 4, bool(turn)))
        return listed

    # ---- inside -----------------------------------------------------------------------------------

    async def _execute(self, *commands: tuple[Any, ...]) -> list[Any]:
        """The answers to commands that run in one transaction."""

        async def execute() -> list[Any]:
            async with self._redis.pipeline(transaction=True) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = await pipeline.execute()
                return answers

        try:
            return await self._to_its_end(execute())
        except (RedisError, OSError) as error:
            raise JournalUnavailable(f"the journal does not answer: {error}") from None

    async def _to_its_end(self, command: Coroutine[Any, Any, T]) -> T:
        """Its answer. It runs on if the caller is cancelled, because a cancelled command leaves its connection open."""
        if self._closed:  # a task that outlives its router would connect anew, and nothing would close that
            command.close()
            raise JournalUnavailable("the journal is closed")
        task = asyncio.ensure_future(command)
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _run(self, name: str, session_id: str, tenant: str, *args: Any, more_keys: tuple[str, ...] = ()) -> Any:
        try:
            keys = (*_keys(session_id, tenant), *more_keys)
            answer: Any = await self._to_its_end(self._scripts[name](keys=keys, args=(session_id, *args)))
        except (RedisError, OSError) as error:
            raise JournalUnavailable(f"the journal cannot be written: {error}") from None
        if answer[0] != 0:
            raise error_from_code(answer[0].decode(), answer[1].decode())
        return answer

    def _lease_key(self) -> str:
        return LEASE + self.router

    async def _renew_lease(self) -> None:
        await self._to_its_end(self._redis.set(self._lease_key(), 1, px=int(1000 * self._lease_s)))

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)
            await asyncio.gather(self._renew_lease(), return_exceptions=True)  # turns report the error


def _keys(session_id: str, tenant: str) -> tuple[str, ...]:
    # The session's name comes last, so that no name chosen by a client equals another session's key.
    kinds = ("state", "tokens", "turn")
    return (*(f"{PREFIX}{kind}:{session_id}" for kind in kinds), f"{PREFIX}tenant:{tenant}")


def _objects(tenant: str) -> tuple[str, str]:
    return (f"{PREFIX}objects:{tenant}", f"{PREFIX}object-keys:{tenant}")


def _record(session_id: str, tenant: str, answer: list[Any]) -> SessionRecord:
    _, worker, epoch, num_turns, tokens = answer
    return SessionRecord(session_id, tenant, worker.decode(), int(epoch), int(num_turns), unpack_tokens(tokens))
