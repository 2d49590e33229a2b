"""``holdfast bench``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click

from cluster.bench.load import Load, run_load
from cluster.bench.report import plot, report, rows
from cluster.cli.client import call, client_options, print_rows


@click.command()
@client_options
@click.option("--model", help="default: the first that the server has")
@click.option("--sessions", type=click.IntRange(1), default=16, show_default=True)
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True, help="of a session")
@click.option("--input-words", type=click.IntRange(1), default=40, show_default=True, help="of a message")
@click.option("--output-tokens", type=click.IntRange(1), default=32, show_default=True, help="of an answer")
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True, help="sessions at once")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), help="open loop: new sessions a second, however many run"
)
@click.option(
    "--think", "think_s", type=click.FloatRange(0), default=0.0, show_default=True, help="seconds between turns"
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="write the figures to this file, as JSON")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="write a plot to this file, as SVG")
def bench(
    url: str,
    api_key: str | None,
    as_json: bool,
    model: str | None,
    out: Path | None,
    plot_file: Path | None,
    **settings: float,
) -> None:
    """Measure sessions of several turns on a router, or on any server with OpenAI's chat API.

    Percentiles are p50 / p95 / p99. Exit code 1 if a turn failed.
    """
    name = model or call("GET", url, "/v1/models", api_key)["data"][0]["id"]
    load = Load(url, name, api_key=api_key, **settings)  # type: ignore[arg-type]  # click has checked the types
    results, seconds = asyncio.run(run_load(load))
    figures = report(results, seconds)
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n")
    if plot_file is not None:
        plot_file.write_text(plot(figures))
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        columns = {"turn": "turn", "turns": "turns", "first token ms": "first token ms"}
        columns |= {"between tokens ms": "between tokens ms", "latency ms": "latency ms", "cached": "cached"}
        print_rows(rows(figures), columns, False)
        click.echo(f"{figures['turns a second']} turns/s, {figures['output tokens a second']} tokens/s")
    for error in figures["errors"]:
        click.echo(f"holdfast: {error}", err=True)
    sys.exit(bool(figures["failed turns"]))
