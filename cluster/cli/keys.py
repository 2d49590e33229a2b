"""``holdfast keys``: the file of API keys that routers accept."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from cluster.cli.client import print_rows
from holdfast.errors import HoldfastError
from router.access.audit_log import AuditLog
from router.access.keys import ROLES, Limits, Role, StoredKey, check_groups, new_key, read_keys, write_keys

DAY_S = 86400.0


@click.group()
def keys() -> None:
    """Create, list and revoke API keys. Routers take a change over within a second."""


def _file_options(command: Any) -> Any:
    path = click.Path(path_type=Path)
    command = click.option("--audit-log", envvar="HOLDFAST_AUDIT_LOG", type=path, help="also write what was done here")(
        command
    )
    return click.option(
        "--file", envvar="HOLDFAST_API_KEY_FILE", type=path, required=True, show_envvar=True, help="api_key_file"
    )(command)


@keys.command()
@_file_options
@click.option("--tenant", required=True, help="whose sessions the key sees")
@click.option("--role", "roles", multiple=True, type=click.Choice(ROLES), default=("user",), show_default=True)
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="the key expires after so many")
@click.option("--max-turns", type=click.IntRange(1), help="turns of the tenant at once, on one router")
@click.option("--max-sessions", type=click.IntRange(1), help="open sessions of the tenant")
@click.option("--tokens-per-min", type=click.IntRange(1), help="tokens of the tenant, on one router")
@click.option(
    "--kv-share",
    type=click.FloatRange(0, 1, min_open=True),
    help="the part of each worker's KV that others cannot take; what is beyond it is evicted first",
)
@click.option("--share-group", help="tenants of the same group share cached prefixes, and a KV share")
def create(
    file: Path,
    audit_log: Path | None,
    tenant: str,
    roles: tuple[Role, ...],
    days: float | None,
    max_turns: int | None,
    max_sessions: int | None,
    tokens_per_min: int | None,
    kv_share: float | None,
    share_group: str | None,
) -> None:
    """Print a new key. It is not kept, so nobody can print it again."""
    limits = Limits(max_turns=max_turns, max_sessions=max_sessions, tokens_per_min=tokens_per_min, kv_share=kv_share)
    expires_at = time.time() + days * DAY_S if days is not None else None
    key, stored = new_key(tenant, roles, limits, expires_at, share_group)
    with _edited(file) as known:
        known.append(stored)
        check_groups(known)
    _log(audit_log, "create key", stored)
    click.echo(key)


@keys.command(name="list")
@_file_options
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def list_keys(file: Path, audit_log: Path | None, as_json: bool) -> None:
    """Show what is kept of the keys."""
    rows = [
        {
            "key_id": key.key_id,
            "tenant": key.tenant,
            "roles": " ".join(sorted(key.roles)),
            "max_turns": key.limits.max_turns,
            "max_sessions": key.limits.max_sessions,
            "tokens_per_min": key.limits.tokens_per_min,
            "kv_share": key.limits.kv_share,
            "share_group": key.share_group,
            "expires": datetime.fromtimestamp(key.expires_at, UTC).isoformat("T", "minutes") if key.expires_at else "",
        }
        for key in read_keys(file)
    ]
    names = ("key_id", "tenant", "roles", *Limits.model_fields, "share_group")
    titles = {name: name.replace("_", " ") for name in names}
    print_rows(rows, titles | {"expires": "expires"}, as_json)


@keys.command()
@_file_options
@click.argument("key_id")
def revoke(file: Path, audit_log: Path | None, key_id: str) -> None:
    """Remove the key of that id: requests that come with it are refused from now on."""
    with _edited(file) as known:
        revoked = [key for key in known if key.key_id == key_id]
        if not revoked:
            raise HoldfastError(f"no key {key_id} in {file}; there are {', '.join(k.key_id for k in known) or 'none'}")
        known[:] = [key for key in known if key.key_id != key_id]
    _log(audit_log, "revoke key", revoked[0])


@contextmanager
def _edited(file: Path) -> Iterator[list[StoredKey]]:
    """The keys, to be changed: one process at a time."""
    lock = os.open(file.with_name(f".{file.name}.lock"), os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_keys(file)
        yield known
        write_keys(file, known)
    finally:
        os.close(lock)


def _log(path: Path | None, action: str, key: StoredKey) -> None:
    log = AuditLog(path)
    log.write(action, key_id=key.key_id, tenant=key.tenant, roles=" ".join(sorted(key.roles)), by=f"uid {os.getuid()}")
    log.close()
