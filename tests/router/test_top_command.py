"""``holdfast top`` against a router."""

from __future__ import annotations

import asyncio

import httpx
from click.testing import CliRunner
from rich.console import Console

from cluster.cli.main import cli
from cluster.cli.top import sample, view
from tests.harness import Harness


async def test_rates_and_pages_of_a_working_cluster(cluster: Harness) -> None:
    before = await asyncio.to_thread(sample, cluster.url, None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
        body = {"model": "holdfast-tiny", "prompt": "Return the", "max_tokens": 40, "ignore_eos": True}
        await http.post("/v1/completions", json=body, headers={"X-Session-ID": "s"})
    now = await asyncio.to_thread(sample, cluster.url, None)
    console = Console(record=True, width=160)
    console.print(view(now, before))
    text = console.export_text()
    rates = [line.split("│")[6].strip() for line in text.splitlines() if "serving" in line]
    assert len(rates) == 2 and max(map(float, rates)) > 0
    assert text.count(" full ") == 2 and "failovers 0" in text


async def test_the_command(cluster: Harness) -> None:
    asked = ["top", "--url", cluster.url, "--interval", "0.1", "--count", "3"]
    result = await asyncio.to_thread(CliRunner().invoke, cli, asked)
    assert result.exit_code == 0 and "w0" in result.output and "KV group" in result.output, result.output
