"""``holdfast status``, ``sessions`` and ``audit``."""

from __future__ import annotations

import sys
from typing import Any

import click

from cluster.cli.client import client_options, get_rows, print_rows


@click.command()
@client_options
def status(url: str, api_key: str | None, as_json: bool) -> None:
    """Show the workers: their processes, pages and turns."""
    workers = get_rows(url, "/holdfast/workers", api_key)
    columns = {"worker_id": "worker", "incarnation": "incarnation", "pid": "pid", "pages_free": "pages free"}
    columns |= {"pages_held": "held", "pages_cached": "cached", "sessions": "sessions"}
    columns |= {"running": "running", "waiting": "waiting", "retracted": "retracted", "metrics_url": "metrics"}
    print_rows(workers, columns, as_json)
    if not as_json and any(len(worker["ranks"]) > 1 for worker in workers):
        columns = {"worker_id": "worker", "rank": "rank", "pid": "pid", "node": "node"}
        columns |= {"log_index": "log index", "lag": "lag"}
        print_rows(_by_rank(workers), columns, as_json)


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
    columns |= {"num_pages": "pages", "num_free": "free", "num_held": "held"}
    columns |= {"num_cached": "cached", "num_slots": "slots", "num_running": "running"}
    columns |= {"leaked": "leaked", "overheld": "overheld", "faults": "faults"}
    for report in reports:
        for rank in report["ranks"]:
            rank |= {"log_index": report["log_index"], "digest": f"{int(rank['digest']):016x}"}
    print_rows(reports if as_json else _by_rank(reports), columns, as_json)
    if not all(report["ok"] for report in reports):
        sys.exit(1)


def _by_rank(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"worker_id": worker["worker_id"], **rank} for worker in workers for rank in worker["ranks"]]
