"""``holdfast serve``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import click

from cluster.cli.supervised import joined, own_node, serve_supervised
from cluster.config import JOURNAL_URL, SECRETS, Config, load_config
from cluster.guard import Generation, run_guarded
from cluster.ray_backend.nodes import gcs_storage
from holdfast.errors import ConfigError, HoldfastError
from router.journal.sqlite_file import check_writable
from workers.store.folders import remove_stale


def config_flags(command: Any) -> Any:
    """Every key of the configuration as a flag of the same name."""
    for name, field in reversed(Config.model_fields.items()):
        kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
        kind = kinds[0] if len(kinds) == 1 and kinds[0] in (int, float) else str
        repeated = field.annotation == list[str]
        # Only the text names the default: the configuration applies it, so that a flag not given leaves the file's key.
        text = f"{field.description}{_default(field.default)}"
        flag = f"--{name.replace('_', '-')}"
        if name in SECRETS:
            command = click.option(flag, name, multiple=True, hidden=True, callback=_refuse_secret)(command)
        elif name == "journal_url":
            command = click.option(flag, name, help=text, default=None, callback=_refuse_password)(command)
        elif kinds == [bool]:
            command = click.option(f"{flag}/--no-{flag[2:]}", name, help=text, default=None)(command)
        else:
            command = click.option(flag, name, type=kind, multiple=repeated, help=text, default=None)(command)
    return command


def _refuse_secret(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    if given:
        variable = SECRETS[str(option.name)]
        raise click.UsageError(
            f"{option.opts[0]}: everybody on this machine can read a command line; "
            f"set the environment variable {variable}, or api_key_file (holdfast keys create)"
        )
    return given


def _refuse_password(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    if given is not None and urlsplit(given).password is not None:
        raise click.UsageError(
            f"{option.opts[0]}: everybody on this machine can read a command line; a URL with a password belongs in "
            f"the environment variable {JOURNAL_URL}, or in the file of --config"
        )
    return given


def _default(value: object) -> str:
    if value in (None, []):
        return ""
    return f"  [default: {value.name if isinstance(value, Path) else value}]"


@click.command()
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file with the keys below")
@click.option("--detach", is_flag=True, help="with --address: leave the cluster running; `holdfast stop` ends it")
@config_flags
def serve(config_file: Path | None, detach: bool, **flags: Any) -> None:
    """Start workers and routers, and serve until SIGINT or SIGTERM.

    On the Ray cluster of --address they outlive this process if it is killed: started again, it attaches to them.
    Without --address they run on a Ray node of their own.
    """
    given = {k: list(v) if isinstance(v, tuple) else v for k, v in flags.items() if v not in (None, ())}
    config = load_config(config_file, given)
    config.engine()
    if config.journal_url is None:
        check_writable(config.journal_path)
    if detach and config.address is None:
        raise ConfigError("detach: needs the address of a Ray cluster, which the processes run on")
    with gcs_storage() as storage:
        own = partial(own_node, config, gcs_storage=storage)

        def run(generation: Generation) -> None:
            on_ray = own if config.address is None else lambda stop: joined(config)
            _run(serve_supervised(config, on_ray, generation, detach))

        code = run_guarded(run, config.drain_timeout_s)
    remove_stale()
    sys.exit(code)


def _run(serving: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(serving)
    except HoldfastError as error:
        click.echo(f"holdfast: {error.message}", err=True)
        sys.exit(1)
