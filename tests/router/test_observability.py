"""Metrics are those that the documentation lists; the dashboard and the alert rules ask for nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.harness import running
from tests.parity.matrix import CONFIG
from tests.store.nodes import Stub, copied, node, turn, words
from tests.waiting import until

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "holdfast.json").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
Metrics = dict[str, set[str]]
"""By the name of a series, the labels that it was seen with."""


@pytest.fixture
async def metrics(tmp_path: Path) -> AsyncIterator[Metrics]:
    """Of a cluster with two ranks and a store, a failover and a migration."""
    engine = replace(CONFIG, kv_store=tmp_path / "store")
    async with (
        node(tmp_path / "store"),
        running(tmp_path / "c", num_workers=2, engine=engine, tp=2) as cluster,
        cluster.channel() as channel,
        httpx.AsyncClient(base_url=cluster.url, timeout=30) as http,
    ):
        stub = Stub(channel)
        await turn(stub, "s", words(1, 200))
        await copied(cluster, cluster.pinned_to("s"))
        await http.post(f"/holdfast/workers/{cluster.pinned_to('s')}/drain")

        async def seen() -> Metrics:
            await turn(stub, "t", [1, 2, 3])
            text = (await http.get("/metrics")).text
            found: Metrics = {}
            for family in text_string_to_metric_families(text):
                for suffix in SUFFIXES.get(family.type, ("",)):
                    labels = {name for sample in family.samples for name in sample.labels}
                    found[family.name + suffix] = labels
            return found

        await until(lambda: _has_labels(cluster), 10, "the workers' beats")
        yield await seen()


def _has_labels(cluster: Any) -> bool:
    return all(link.stats.HasField("kv_store") and link.stats.ranks for link in cluster.router.core.fleet.alive())


def _expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def _selected(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each series that an expression asks for, and the labels that it asks by."""
    for name, matchers in re.findall(r"(holdfast_\w+)(\{[^}]*\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!=|=)", matchers))


async def test_the_dashboard_and_the_alerts_ask_for_metrics_that_there_are(metrics: Metrics) -> None:
    names = [title for title, _ in _expressions()]
    assert len(names) > 25
    for title, expression in _expressions():
        promql_parser.parse(expression)
        grouped = {label for part in re.findall(r"by \(([^)]*)\)", expression) for label in part.split(", ")}
        asked = list(_selected(expression))
        assert asked, title
        for name, labels in asked:
            assert name in metrics, f"{title}: {name}"
            assert labels | grouped <= metrics[name] | {"le"} or not metrics[name], f"{title}: {name}"


async def test_the_documentation_lists_the_metrics_that_there_are(metrics: Metrics) -> None:
    rows = [line.split("|")[1] for line in OPERATIONS.splitlines() if line.startswith("| `holdfast_")]
    listed = {name for row in rows for name in re.findall(r"`(holdfast_\w+)`", row)}
    there = {re.sub(r"_(bucket|sum|count)$", "", name) for name in metrics if not name.endswith("_created")}
    assert listed == there


def test_alerts_say_what_is_wrong() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 8
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"]


def test_events_that_alerts_ask_for_are_documented() -> None:
    """An event that has not happened has no series: a misspelt one would never fire."""
    for title, expression in _expressions():
        for events in re.findall(r'event=~?"([^"]+)"', expression):
            for event in events.split("|"):
                assert f"`{event}`" in OPERATIONS, f"{title}: {event}"
