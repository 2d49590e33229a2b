"""API keys: what is kept of them, and whom a request comes from.

A key is 32 random bytes, so what is kept is its SHA-256: nobody can guess a key by trying, and a slow hash (argon2,
scrypt), which is made to protect what people can remember, would cost each request tens of milliseconds and protect
nothing more.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from holdfast.errors import ConfigError, Unauthenticated
from holdfast.v1 import worker_pb2

log = logging.getLogger("holdfast.router")
Role = Literal["user", "operator", "metrics"]
ROLES: tuple[Role, ...] = ("user", "operator", "metrics")
PREFIX = "hf-"
ID_CHARS = 12
RELOAD_S = 1.0
"""Between two looks at the file."""
GROUP = "group:"
"""What a group's scope begins with: no tenant's name does."""
TENANT = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class Limits(BaseModel):
    """Of a tenant, if nothing else is said on one router. None: as the cluster's configuration says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_turns: int | None = Field(None, ge=1)
    max_sessions: int | None = Field(None, ge=1)
    """Open ones, of all routers over one journal."""
    tokens_per_min: int | None = Field(None, ge=1)
    kv_share: float | None = Field(None, gt=0, le=1)
    """Of each worker's KV: what is beyond it is evicted first, and evicts nobody. The same on all routers."""


NO_LIMITS = Limits()


class StoredKey(BaseModel):
    """What is kept of a key. ``key_id``: the beginning of its hash."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key_id: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    tenant: Annotated[str, StringConstraints(pattern=TENANT)]
    roles: frozenset[Role] = frozenset(("user",))
    limits: Limits = NO_LIMITS
    share_group: Annotated[str, StringConstraints(pattern=TENANT)] | None = None
    """Tenants of one group share cached prefixes, and a share of the KV."""
    created_at: float = 0.0
    expires_at: float | None = None


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[StoredKey] = []


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a request comes from."""

    tenant: str
    roles: frozenset[str]
    key_id: str = ""


ANYBODY = Identity("", frozenset(ROLES))
"""Where there are no keys."""


def new_key(
    tenant: str,
    roles: Iterable[Role] = ("user",),
    limits: Limits = NO_LIMITS,
    expires_at: float | None = None,
    share_group: str | None = None,
) -> tuple[str, StoredKey]:
    """A key, which nobody will see again, and what is kept of it. Raises ConfigError."""
    key = PREFIX + secrets.token_urlsafe(32)
    digest = _digest(key)
    try:
        stored = StoredKey(
            key_id=digest[:ID_CHARS],
            sha256=digest,
            tenant=tenant,
            roles=frozenset(roles),
            limits=limits,
            share_group=share_group,
            created_at=time.time(),
            expires_at=expires_at,
        )
    except ValidationError as error:
        raise ConfigError(f"key: {error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}") from None
    return key, stored


def given_key(key: str, roles: Iterable[Role] = ("user",)) -> StoredKey:
    """What is kept of a key that somebody made up: each is a tenant by itself."""
    digest = _digest(key)
    tenant = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return StoredKey(key_id=digest[:ID_CHARS], sha256=digest, tenant=tenant, roles=frozenset(roles))


def read_keys(path: Path) -> list[StoredKey]:
    """The keys of a file; none if there is no file. Raises ConfigError."""
    try:
        keys = _KeyFile.model_validate_json(path.read_bytes()).keys
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"api_key_file: cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"api_key_file: {path}: {place}: {first['msg']}") from None
    check_groups(keys)
    return keys


def check_groups(keys: Iterable[StoredKey]) -> None:
    """Raises ConfigError if keys of one tenant are of several groups."""
    group_of: dict[str, str | None] = {}
    for key in keys:
        if group_of.setdefault(key.tenant, key.share_group) != key.share_group:
            raise ConfigError(
                f"api_key_file: share_group: the keys of tenant {key.tenant} must all have the same, or none"
            )


def write_keys(path: Path, keys: Sequence[StoredKey]) -> None:
    """Replace a file's keys, all or none. Only its owner can read it. Raises ConfigError."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(_KeyFile(keys=list(keys)).model_dump_json(indent=1) + "\n")
        written.replace(path)
    except OSError as error:
        written.unlink(missing_ok=True)
        raise ConfigError(f"api_key_file: cannot write {path}: {error.strerror}") from None


class Keyring:
    """The keys that a router accepts: those it was given, and those of a file, which it reads again when it changes.

    A file that cannot be read any more leaves the keys as they were. Raises ConfigError.
    """

    def __init__(self, keys: Sequence[StoredKey] = (), file: Path | None = None) -> None:
        self._given, self._file = tuple(keys), file
        self._stamp, self._looked_at = _stamp(file), time.monotonic()
        self._stored: dict[str, StoredKey] = {}
        self._limits: dict[str, Limits] = {}
        self._scopes: dict[str, worker_pb2.KVScope] = {}
        self._keep(read_keys(file) if file is not None else [])

    def _keep(self, in_file: Sequence[StoredKey]) -> None:
        self._stored = {key.sha256: key for key in (*in_file, *self._given)}
        by_tenant: dict[str, list[Limits]] = {}
        for key in self._stored.values():
            by_tenant.setdefault(key.tenant, []).append(key.limits)
        self._limits = {tenant: _least(limits) for tenant, limits in by_tenant.items()}
        self._scopes = _scopes(self._stored.values())

    @property
    def is_open(self) -> bool:
        """Whether everybody may do everything."""
        return not self._given and self._file is None

    @property
    def num_tenants(self) -> int:
        """How many have keys; 1 where there are no keys."""
        return max(1, len({key.tenant for key in self._stored.values()}))

    def limits_of(self, tenant: str) -> Limits:
        """A tenant's: of each, the least that one of its keys has."""
        return self._limits.get(tenant, NO_LIMITS)

    def scope_of(self, tenant: str) -> worker_pb2.KVScope:
        """With whom a tenant shares prefixes, and the KV that they may keep from others: the least of their keys'."""
        return self._scopes.get(tenant) or worker_pb2.KVScope(name=tenant)

    def identify(self, authorization: str | None) -> Identity:
        """Whom a header ``Authorization: Bearer KEY`` comes from. Raises Unauthenticated."""
        if self.is_open:
            return ANYBODY
        self._reload()
        # Looked up by a hash of what was sent: how long that takes says nothing about the keys there are.
        key = self._stored.get(_digest((authorization or "").removeprefix("Bearer ").strip()))
        if key is None or (key.expires_at is not None and key.expires_at <= time.time()):
            raise Unauthenticated("send a valid API key: Authorization: Bearer KEY")
        return Identity(key.tenant, key.roles, key.key_id)

    def _reload(self) -> None:
        if self._file is None or time.monotonic() < self._looked_at + RELOAD_S:
            return
        self._looked_at, stamp = time.monotonic(), _stamp(self._file)
        if stamp == self._stamp:
            return
        try:
            self._keep(read_keys(self._file))
        except ConfigError as error:
            log.error("%s; the keys are those of before", error.message)
        self._stamp = stamp


def _least(limits: Sequence[Limits]) -> Limits:
    given = {
        name: [value for each in limits if (value := getattr(each, name)) is not None] for name in Limits.model_fields
    }
    return Limits(**{name: min(values) for name, values in given.items() if values})


def _scopes(keys: Iterable[StoredKey]) -> dict[str, worker_pb2.KVScope]:
    names = {key.tenant: f"{GROUP}{key.share_group}" if key.share_group else key.tenant for key in keys}
    shares: dict[str, float] = {}
    for key in keys:
        if key.limits.kv_share is not None:
            shares[names[key.tenant]] = min(key.limits.kv_share, shares.get(names[key.tenant], 1.0))
    return {
        tenant: worker_pb2.KVScope(name=name, share_ppm=max(1, round(shares[name] * 1e6)) if name in shares else 0)
        for tenant, name in names.items()
    }


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    try:
        status = path.stat() if path is not None else None
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size, status.st_ino) if status is not None else None
