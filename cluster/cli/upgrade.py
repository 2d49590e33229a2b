"""``holdfast upgrade``: other settings for the workers of a cluster that serves meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from cluster.cli.client import get_rows, ray_address, url_option
from cluster.cli.nodes import print_drained, restart_all
from cluster.cli.serve import config_flags
from cluster.cli.supervised import joined
from cluster.config import Config, load_config
from holdfast.errors import NoWorkerAvailable


@click.command()
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file with the keys below")
@click.option(
    "--timeout", "timeout_s", type=float, default=30.0, show_default=True, help="seconds that turns may continue"
)
@click.option("--as-key", envvar="HOLDFAST_API_KEY", help="a key with the role operator")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@url_option
@config_flags
def upgrade(
    config_file: Path | None, timeout_s: float, as_key: str | None, as_json: bool, url: str, **flags: Any
) -> None:
    """Restart the workers of a cluster with other settings, one after another, while the others serve.

    The cluster is that of the Ray cluster at --address, else that of the router at --url. What is not given stays as
    it is. Sessions migrate with their KV where its layout is the same, else they are computed again. Without any
    setting, workers get the version of Holdfast that their nodes have now.
    """
    given = load_config(config_file, {k: v for k, v in flags.items() if v not in (None, ())})
    if given.address is None:
        given.address = ray_address(url, as_key)
    url, start_timeout_s = asyncio.run(_reconfigure(given, as_key))
    print_drained(restart_all(url, as_key, start_timeout_s, timeout_s), as_json)


async def _reconfigure(given: Config, as_key: str | None) -> tuple[str, float]:
    """Have workers that start from now on have the settings. Returns a router's URL, and a start's deadline."""
    async with joined(given):
        from cluster.ray_backend.cluster import check_upgrade
        from cluster.ray_backend.processes import ray_errors
        from cluster.ray_backend.supervisor_actor import wait_for_leader

        actor, state = await wait_for_leader()
        if not state.ready:
            raise NoWorkerAvailable("the cluster does not serve yet; upgrade it when it does")
        with ray_errors("the settings were not changed"):
            running = (await actor.charge.remote()).config
            changes = {name: getattr(given, name) for name in given.model_fields_set if name != "address"}
            wanted = running.model_copy(update=changes).with_whole_paths()
            check_upgrade(running, wanted)
            # Who may not restart workers changes nothing.
            await asyncio.to_thread(get_rows, state.urls[0], "/holdfast/workers", as_key)
            await actor.upgrade.remote(wanted)
        return state.urls[0], running.start_timeout_s
