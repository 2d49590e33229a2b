"""``holdfast chaos``."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

import click

from cluster.chaos.run import Chaos
from cluster.cli.client import DEFAULT_URL


@click.command()
@click.option(
    "--url",
    "urls",
    multiple=True,
    envvar="HOLDFAST_URL",
    default=[DEFAULT_URL],
    show_default=True,
    show_envvar=True,
    help="a router; repeat it for each",
)
@click.option("--faults", type=int, default=20, show_default=True, help="how many processes to kill or stop")
@click.option("--seed", type=int, default=1, show_default=True)
def chaos(urls: tuple[str, ...], faults: int, seed: int) -> None:
    """Kill and stop processes of a cluster on this machine under a load that verifies every token.

    SIGINT ends the run early, with a report of what was seen until then.
    Exit code 1 if a token was lost, repeated or changed, a turn did not end, or a page leaked.
    """

    async def run() -> dict[str, Any]:
        chaos = Chaos(list(urls), seed)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, chaos.end)
        return (await chaos.run(faults)).as_dict()

    figures = asyncio.run(run())
    click.echo(json.dumps(figures, indent=2))
    if figures["failures"] or figures["pages leaked"]:
        sys.exit(1)
