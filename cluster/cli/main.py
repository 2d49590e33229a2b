"""The ``holdfast`` command: its groups of commands, and how errors are reported."""

from __future__ import annotations

import logging
import sys

import click

from cluster.cli.bench import bench
from cluster.cli.chaos import chaos
from cluster.cli.chat import chat
from cluster.cli.keys import keys
from cluster.cli.nodes import drain, join, restart
from cluster.cli.serve import serve
from cluster.cli.show import audit, sessions, status
from cluster.cli.supervised import stop
from cluster.cli.top import top
from cluster.cli.tune import tune
from cluster.cli.upgrade import upgrade
from holdfast.errors import HoldfastError


@click.group()
def cli() -> None:
    """Serve LLM sessions that survive the death of any worker."""


for command in (
    serve,
    stop,
    upgrade,
    tune,
    chat,
    bench,
    top,
    status,
    sessions,
    audit,
    drain,
    restart,
    join,
    keys,
    chaos,
):
    cli.add_command(command)


def main() -> None:
    """Entry point. A HoldfastError is one line on stderr, with exit code 1."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        cli()
    except HoldfastError as error:
        click.echo(f"holdfast: {error.message}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
