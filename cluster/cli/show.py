"""``holdfast status``, ``sessions`` and ``audit``."""

from __future__ import annotations

import sys
from typing import Any

import click

from cluster.cli.client import call, client_options, get_rows, print_rows


@click.command()
@client_options
def status(url: str, api_key: str | None, as_json: bool) -> None:
    """Show the workers: their processes, pages and turns."""
    workers = get_rows(url, "/holdfast/workers", api_key)
    router = call("GET", url, "/holdfast/router", api_key)
    if router["degraded"]:
        click.echo(f"degraded: {router['degraded']}", err=True)
    columns = {"worker_id": "worker", "incarnation": "incarnation", "pid": "pid", "sessions": "sessions"}
    columns |= {"running": "running", "waiting": "waiting", "retracted": "retracted", "metrics_url": "metrics"}
    print_rows(workers, columns, as_json)
    if not as_json:
        columns = {"worker_id": "worker", "group": "KV group", "total": "pages", "free": "free"}
        print_rows(_by("groups", workers), columns | {"held": "held", "cached": "cached"}, as_json)
    stores = [worker for worker in workers if worker.get("kv_store")]
    if not as_json and stores:
        columns = {"worker_id": "worker", "bytes_total": "KV store bytes", "bytes_used": "used", "copies": "copies"}
        rows = [{"worker_id": worker["worker_id"]} | worker["kv_store"] for worker in stores]
        columns |= {"disk_bytes_used": "on disk", "replicas": "also on", "waiting": "pages to copy"}
        print_rows(rows, columns, as_json)
        columns = {"worker_id": "worker", "kv_tokens_loaded": "KV tokens loaded", "kv_pages_from_memory": "from memory"}
        columns |= {"kv_pages_from_disk": "from disk", "kv_pages_from_peers": "from other nodes"}
        columns |= {"kv_loads_failed": "loads that failed"}
        print_rows([dict.fromkeys(columns, 0) | worker["counters"] | worker for worker in stores], columns, as_json)
    if not as_json:
        retracted = sum(int(worker["counters"].get("recomputed_tokens", 0)) for worker in workers)
        row = router["recomputed_tokens"] | {"retracted": retracted}
        titles = {"failover": "tokens computed again: failover", "moved": "moved", "evicted": "evicted"}
        print_rows([row], titles | {"retracted": "retracted"}, as_json)
    if not as_json and any(len(worker["ranks"]) > 1 for worker in workers):
        columns = {"worker_id": "worker", "rank": "rank", "pid": "pid", "node": "node"}
        columns |= {"log_index": "log index", "lag": "lag"}
        print_rows(_by("ranks", workers), columns, as_json)


@click.command()
@client_options
def sessions(url: str, api_key: str | None, as_json: bool) -> None:
    """Show the tenant's sessions: pin, epoch and length."""
    columns = {"session_id": "session", "worker": "pinned to", "epoch": "epoch"}
    columns |= {"num_tokens": "tokens", "num_turns": "turns", "busy": "busy"}
    print_rows(get_rows(url, "/holdfast/sessions", api_key), columns, as_json)


@click.command()
@client_options
def audit(url: str, api_key: str | None, as_json: bool) -> None:
    """Recount every page on every rank. Exit code 1 if one leaked or ranks differ. Exact on a busy cluster."""
    reports = get_rows(url, "/holdfast/audit", api_key)
    columns = {"worker_id": "worker", "rank": "rank", "log_index": "log index", "digest": "digest", "ok": "ok"}
    columns |= {"num_slots": "slots", "num_running": "running", "faults": "faults"}
    for report in reports:
        for rank in report["ranks"]:
            rank |= {"log_index": report["log_index"], "digest": f"{int(rank['digest']):016x}"}
    if as_json:
        print_rows(reports, columns, as_json)
    else:
        ranks = _by("ranks", reports)
        print_rows(ranks, columns, as_json)
        columns = {"worker_id": "worker", "rank": "rank", "group": "KV group", "total": "pages", "free": "free"}
        columns |= {"held": "held", "cached": "cached", "leaked": "leaked", "overheld": "overheld"}
        print_rows(_by("groups", ranks, "rank"), columns, as_json)
    if not all(report["ok"] for report in reports):
        sys.exit(1)


def _by(part: str, rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """A row for each of the rows' parts, with the worker and ``keys`` of the row that it is of."""
    return [{key: row[key] for key in ("worker_id", *keys)} | each for row in rows for each in row[part]]
