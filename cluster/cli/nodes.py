"""``holdfast drain``, ``restart`` and ``join``."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from cluster.cli.client import call, client_options, get_rows, print_rows, url_option
from cluster.ray_backend import nodes
from holdfast.errors import HoldfastError

MIGRATION_ALLOWANCE_S = 180.0
"""How long a drain may take beyond what its turns are given: more than ``migration_timeout_s``."""
POLL_S = 0.2


def _drain_options(command: Any) -> Any:
    return click.option(
        "--timeout", "timeout_s", type=float, default=30.0, show_default=True, help="seconds that turns may continue"
    )(client_options(command))


def _drain(url: str, api_key: str | None, worker_id: str, timeout_s: float, *, stop: bool) -> dict[str, Any]:
    path = f"/holdfast/workers/{worker_id}/drain?timeout_s={timeout_s}&stop={str(stop).lower()}"
    report: dict[str, Any] = call("POST", url, path, api_key, timeout_s + MIGRATION_ALLOWANCE_S)
    return report


def print_drained(reports: list[dict[str, Any]], as_json: bool) -> None:
    columns = {"worker_id": "drained", "turns_preempted": "turns preempted", "sessions_migrated": "sessions migrated"}
    columns |= {"sessions_left": "to recompute", "pages": "pages", "bytes": "bytes", "seconds": "seconds"}
    print_rows(reports, columns, as_json)


@click.command()
@click.argument("workers", nargs=-1)
@click.option("--node", help="all workers with a rank on this node: its address, or its id as in status")
@click.option("--stop", is_flag=True, help="end the worker afterwards; its next incarnation starts")
@_drain_options
def drain(
    workers: tuple[str, ...],
    node: str | None,
    stop: bool,
    timeout_s: float,
    url: str,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Have WORKERS stop admitting turns, and migrate their sessions with their KV to other workers."""
    alive = get_rows(url, "/holdfast/workers", api_key)
    names = [*workers, *(nodes.workers_on(alive, node) if node is not None else [])]
    if not names:
        raise HoldfastError(f"no worker has a rank on node {node}" if node else "name a worker, or a node with --node")
    print_drained([_drain(url, api_key, name, timeout_s, stop=stop) for name in names], as_json)


@click.command()
@click.option("--start-timeout", "start_timeout_s", type=float, default=120.0, show_default=True)
@_drain_options
def restart(start_timeout_s: float, timeout_s: float, url: str, api_key: str | None, as_json: bool) -> None:
    """Restart all workers, one after another, while the others serve. Clients do not notice."""
    print_drained(restart_all(url, api_key, start_timeout_s, timeout_s), as_json)


def restart_all(url: str, api_key: str | None, start_timeout_s: float, timeout_s: float) -> list[dict[str, Any]]:
    """Restart all workers, one after another. Returns what was migrated. Raises HoldfastError."""
    reports = []
    for worker in get_rows(url, "/holdfast/workers", api_key):
        name = worker["worker_id"]
        reports.append(_drain(url, api_key, name, timeout_s, stop=True))
        deadline = time.monotonic() + start_timeout_s
        while not _serves_again(get_rows(url, "/holdfast/workers", api_key), worker):
            if time.monotonic() > deadline:
                raise HoldfastError(
                    f"{name} did not start again within {start_timeout_s} s; later workers are not restarted"
                )
            time.sleep(POLL_S)
    return reports


def _serves_again(workers: list[dict[str, Any]], before: dict[str, Any]) -> bool:
    name, incarnation = before["worker_id"], int(before["incarnation"])
    return any(worker["worker_id"] == name and int(worker["incarnation"]) > incarnation for worker in workers)


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("address")
@click.option("--num-cpus", type=int, required=True, help="how many ranks this node can run")
@click.option(
    "--timeout", "timeout_s", type=float, default=30.0, show_default=True, help="seconds that turns may continue"
)
@url_option
@click.option("--api-key", envvar="HOLDFAST_API_KEY", help="the tenant's key")
@click.argument("ray_options", nargs=-1, type=click.UNPROCESSED)
def join(
    address: str, num_cpus: int, timeout_s: float, url: str, api_key: str | None, ray_options: tuple[str, ...]
) -> None:
    """Have this machine join the Ray cluster at ADDRESS. On SIGTERM its workers are drained before it leaves.

    RAY_OPTIONS are passed to ``ray start``.
    """

    def drain_node(node_id: str) -> None:
        for name in nodes.workers_on(get_rows(url, "/holdfast/workers", api_key), node_id[:8]):
            print_drained([_drain(url, api_key, name, timeout_s, stop=False)], as_json=False)

    sys.exit(nodes.serve_node(address, [f"--num-cpus={num_cpus}", *ray_options], drain_node))
