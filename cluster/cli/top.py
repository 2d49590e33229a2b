"""``holdfast top``: a live view of the workers, their KV and what fails over."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from cluster.cli.client import ask, get_rows, url_option

SHOWN = ("holdfast_failovers", "holdfast_resumed_turns", "holdfast_migrations", "holdfast_rejected_turns")
"""Counters of a router."""


@dataclass(slots=True)
class Sample:
    """What the cluster said at one moment."""

    at: float
    workers: list[dict[str, Any]]
    counters: dict[str, float]


def sample(url: str, api_key: str | None) -> Sample:
    """Ask a router. Raises HoldfastError if there is none."""
    workers = get_rows(url, "/holdfast/workers", api_key)
    text = ask("GET", url, "/metrics", api_key).text
    counters = {
        family.name: sum(s.value for s in family.samples if s.name.endswith("_total"))
        for family in text_string_to_metric_families(text)
        if family.name in SHOWN
    }
    return Sample(time.monotonic(), workers, counters)


def view(now: Sample, before: Sample | None) -> Group:
    """Tables of a sample; rates are since the one before."""
    known = {worker["worker_id"]: worker for worker in before.workers} if before is not None else {}
    seconds = now.at - before.at if before is not None else 0.0
    workers = Table("worker", "incarnation", "sessions", "running", "waiting", "tokens/s", "steps/s", "state")
    pages = Table("worker", "KV group", "pages", "held", "cached", "free", "used")
    for worker in now.workers:
        old = known.get(worker["worker_id"], {})
        workers.add_row(
            worker["worker_id"],
            str(worker["incarnation"]),
            *(str(worker[name]) for name in ("sessions", "running", "waiting")),
            _rate(worker, old, "generated_tokens", seconds),
            _rate(worker, old, "steps", seconds),
            "draining" if worker["draining"] else "serving",
        )
        for group in worker["groups"]:
            used = 1 - group["free"] / max(1, group["total"])
            counts = (str(group[name]) for name in ("total", "held", "cached", "free"))
            pages.add_row(worker["worker_id"], group["group"], *counts, f"{used:.0%}")
    totals = ", ".join(f"{name.removeprefix('holdfast_')} {now.counters.get(name, 0):g}" for name in SHOWN)
    return Group(workers, pages, totals)


def _rate(worker: dict[str, Any], old: dict[str, Any], name: str, seconds: float) -> str:
    if seconds <= 0 or old.get("incarnation") != worker["incarnation"]:
        return ""
    counts = (int(each["counters"].get(name, 0)) for each in (worker, old))
    return f"{(next(counts) - next(counts)) / seconds:.1f}"


@click.command()
@url_option
@click.option("--api-key", envvar="HOLDFAST_API_KEY", help="the tenant's key")
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="seconds")
@click.option("--count", type=click.IntRange(1), help="how many views; default: until Ctrl-C")
def top(url: str, api_key: str | None, interval: float, count: int | None) -> None:
    """Watch the workers, their KV by group, and the router's failovers and migrations."""
    console = Console()
    before, number = sample(url, api_key), 1
    with Live(view(before, None), console=console, auto_refresh=False) as live:
        try:
            while count is None or number < count:
                time.sleep(interval)
                now = sample(url, api_key)
                live.update(view(now, before), refresh=True)
                before, number = now, number + 1
        except KeyboardInterrupt:
            pass
