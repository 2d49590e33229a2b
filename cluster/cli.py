"""The ``holdfast`` command."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any, get_args

import click
import httpx
from rich.console import Console
from rich.table import Table

from cluster import nodes
from cluster.config import Config, load_config
from holdfast.errors import HoldfastError

CLIENT_TIMEOUT_S = 15.0
DRAIN_TIMEOUT_S = 180.0
"""More than a drain may take beside what its turns are given: see ``handover_timeout_s``."""
POLL_S = 0.2


def main() -> None:
    """Entry point: errors of ours are one line on stderr and exit code 1."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        cli()
    except HoldfastError as error:
        click.echo(f"holdfast: {error.message}", err=True)
        sys.exit(1)


@click.group()
def cli() -> None:
    """Serve LLM sessions that survive the death of any worker."""


def _flags(command: Any) -> Any:
    """Every key of the config as a flag, with the same name."""
    for name, field in reversed(Config.model_fields.items()):
        kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
        kind = kinds[0] if len(kinds) == 1 and kinds[0] in (int, float) else str
        repeated = field.annotation == list[str]
        command = click.option(
            f"--{name.replace('_', '-')}", name, type=kind, multiple=repeated, help=field.description, default=None
        )(command)
    return command


@cli.command()
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file with the keys below")
@_flags
def serve(config_file: Path | None, **flags: Any) -> None:
    """Start workers and a router, and serve until SIGINT or SIGTERM."""
    given = {k: list(v) if isinstance(v, tuple) else v for k, v in flags.items() if v not in (None, ())}
    asyncio.run(_serve(load_config(config_file, given)))


async def _serve(config: Config) -> None:
    import ray

    from cluster.ray_cluster import Cluster, connect

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    connect(config)
    cluster = Cluster(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        started = asyncio.ensure_future(cluster.start())
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait((started, stopped), return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            await started
            click.echo(f"ready: {' '.join(cluster.urls)} {' '.join(cluster.grpc_urls)}")
            await stopped
        else:
            started.cancel()
    finally:
        await cluster.stop()
        ray.shutdown()


def _client_options(command: Any) -> Any:
    command = click.option("--json", "as_json", is_flag=True, help="print JSON")(command)
    command = click.option("--api-key", envvar="HOLDFAST_API_KEY", help="key of the tenant")(command)
    return click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="a router")(command)


def _ask(method: str, url: str, path: str, api_key: str | None, timeout_s: float = CLIENT_TIMEOUT_S) -> Any:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.request(method, url + path, headers=headers, timeout=timeout_s)
    except httpx.HTTPError as error:
        raise HoldfastError(f"no router answers at {url}: {error}") from None
    if answer.is_error:
        raise HoldfastError(f"{url} answered {answer.status_code}: {answer.text}")
    return answer.json()


def _get(url: str, path: str, api_key: str | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _ask("GET", url, path, api_key)
    return rows


def _print(rows: list[dict[str, Any]], columns: dict[str, str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(*columns.values())
    for row in rows:
        table.add_row(*(str(row.get(key, "")) for key in columns))
    # Piped output is not cut to a terminal's width.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@cli.command()
@_client_options
def status(url: str, api_key: str | None, as_json: bool) -> None:
    """Workers: who they are, what they hold and run."""
    workers = _get(url, "/holdfast/workers", api_key)
    columns = {"worker_id": "worker", "incarnation": "incarnation", "pid": "pid", "pages_free": "pages free"}
    columns |= {"pages_held": "held", "pages_cached": "cached", "sessions": "sessions"}
    columns |= {"running": "running", "waiting": "waiting", "retracted": "retracted", "metrics_url": "metrics"}
    _print(workers, columns, as_json)
    if not as_json and any(len(worker["ranks"]) > 1 for worker in workers):
        columns = {"worker_id": "worker", "rank": "rank", "pid": "pid", "node": "node"}
        columns |= {"log_index": "log index", "lag": "lag"}
        _print(_by_rank(workers), columns, as_json)


def _by_rank(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"worker_id": worker["worker_id"], **rank} for worker in workers for rank in worker["ranks"]]


@cli.command()
@_client_options
def sessions(url: str, api_key: str | None, as_json: bool) -> None:
    """Sessions: pin, epoch and length of each."""
    columns = {"session_id": "session", "worker": "pinned to", "epoch": "epoch"}
    columns |= {"num_tokens": "tokens", "num_turns": "turns", "busy": "busy"}
    _print(_get(url, "/holdfast/sessions", api_key), columns, as_json)


@cli.command()
@_client_options
def audit(url: str, api_key: str | None, as_json: bool) -> None:
    """Recount every page on every rank; exit code 1 if any is lost or ranks differ. Exact on a busy cluster."""
    reports = _get(url, "/holdfast/audit", api_key)
    columns = {"worker_id": "worker", "rank": "rank", "log_index": "log index", "digest": "digest", "ok": "ok"}
    columns |= {"num_pages": "pages", "num_free": "free", "num_held": "held"}
    columns |= {"num_cached": "cached", "num_slots": "slots", "num_running": "running"}
    columns |= {"leaked": "leaked", "overheld": "overheld", "faults": "faults"}
    for report in reports:
        for rank in report["ranks"]:
            rank |= {"log_index": report["log_index"], "digest": f"{int(rank['digest']):016x}"}
    _print(reports if as_json else _by_rank(reports), columns, as_json)
    if not all(report["ok"] for report in reports):
        sys.exit(1)


def _drain_options(command: Any) -> Any:
    return click.option(
        "--timeout", "timeout_s", type=float, default=30.0, show_default=True, help="seconds turns may go on"
    )(_client_options(command))


def _drained(answers: list[dict[str, Any]], as_json: bool) -> None:
    columns = {"worker_id": "drained", "turns_moved": "turns moved", "sessions_moved": "sessions moved"}
    columns |= {"sessions_left": "to compute again", "pages": "pages", "bytes": "bytes", "seconds": "seconds"}
    _print(answers, columns, as_json)


@cli.command()
@click.argument("workers", nargs=-1)
@click.option("--node", help="all workers with a rank on this node: its address, or its id as in status")
@click.option("--stop", is_flag=True, help="end the worker then; its next incarnation starts")
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
    """Have WORKERS take no more turns, and hand their sessions to the others, KV and all."""
    there = _get(url, "/holdfast/workers", api_key)
    names = [*workers, *(nodes.workers_on(there, node) if node is not None else [])]
    if not names:
        raise HoldfastError(f"no worker has a rank on node {node}" if node else "name a worker, or a node by --node")
    answers = []
    for name in names:
        path = f"/holdfast/workers/{name}/drain?timeout_s={timeout_s}&stop={str(stop).lower()}"
        answers.append(_ask("POST", url, path, api_key, timeout_s + DRAIN_TIMEOUT_S))
    _drained(answers, as_json)


@cli.command()
@click.option("--start-timeout", "start_timeout_s", type=float, default=120.0, show_default=True)
@_drain_options
def restart(start_timeout_s: float, timeout_s: float, url: str, api_key: str | None, as_json: bool) -> None:
    """Restart all workers, one after another, while the others serve. No client notices."""
    answers = []
    for worker in _get(url, "/holdfast/workers", api_key):
        name = worker["worker_id"]
        path = f"/holdfast/workers/{name}/drain?timeout_s={timeout_s}&stop=true"
        answers.append(_ask("POST", url, path, api_key, timeout_s + DRAIN_TIMEOUT_S))
        deadline = time.monotonic() + start_timeout_s
        while not _serves_again(_get(url, "/holdfast/workers", api_key), worker):
            if time.monotonic() > deadline:
                raise HoldfastError(f"{name} did not start again within {start_timeout_s} s; the rest are as they were")
            time.sleep(POLL_S)
    _drained(answers, as_json)


def _serves_again(workers: list[dict[str, Any]], before: dict[str, Any]) -> bool:
    name, incarnation = before["worker_id"], int(before["incarnation"])
    return any(worker["worker_id"] == name and int(worker["incarnation"]) > incarnation for worker in workers)


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("address")
@click.option("--num-cpus", type=int, required=True, help="places for ranks on this node")
@click.option("--timeout", "timeout_s", type=float, default=30.0, show_default=True, help="seconds turns may go on")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="a router")
@click.option("--api-key", envvar="HOLDFAST_API_KEY", help="key of the tenant")
@click.argument("ray_options", nargs=-1, type=click.UNPROCESSED)
def join(
    address: str, num_cpus: int, timeout_s: float, url: str, api_key: str | None, ray_options: tuple[str, ...]
) -> None:
    """Have this machine join the Ray cluster at ADDRESS, until SIGTERM: then its workers are drained first.

    RAY_OPTIONS go to ``ray start``.
    """

    def drain_node(node_id: str) -> None:
        for name in nodes.workers_on(_get(url, "/holdfast/workers", api_key), node_id[:8]):
            path = f"/holdfast/workers/{name}/drain?timeout_s={timeout_s}"
            _drained([_ask("POST", url, path, api_key, timeout_s + DRAIN_TIMEOUT_S)], as_json=False)

    sys.exit(nodes.serve_node(address, [f"--num-cpus={num_cpus}", *ray_options], drain_node))


@cli.command()
@click.option("--url", "urls", multiple=True, help="a router; again for each  [default: http://127.0.0.1:8000]")
@click.option("--faults", type=int, default=20, show_default=True, help="how many processes to kill or stop")
@click.option("--seed", type=int, default=1, show_default=True)
def chaos(urls: tuple[str, ...], faults: int, seed: int) -> None:
    """Kill and stop processes of a cluster on this machine under a load that checks every token.

    SIGINT ends it sooner: the report is of what was seen until then.
    Exit code 1 if a token was lost, repeated or changed, a turn did not end, or a page leaked.
    """
    from cluster.chaos import Chaos

    async def run() -> dict[str, Any]:
        chaos = Chaos(list(urls) or ["http://127.0.0.1:8000"], seed)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, chaos.end)
        return (await chaos.run(faults)).as_dict()

    figures = asyncio.run(run())
    click.echo(json.dumps(figures, indent=2))
    if figures["what went wrong"] or figures["pages leaked"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
