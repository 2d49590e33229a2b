"""Prometheus metrics of a router, and of its workers as of their last beats."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.v1 import worker_pb2
from holdfast.worker_metrics import WorkerCollector

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
RECOMPUTED_REASONS = ("failover", "moved", "evicted")
INTER_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """One registry a router: tests run several routers in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.turns = Counter("holdfast_turns", "Turns ended, by reason", ["reason"], registry=r)
        self.tokens = Counter("holdfast_output_tokens", "Tokens shown to clients", registry=r)
        self.rejected = Counter("holdfast_rejected_turns", "Turns refused with 429", registry=r)
        self.resumed = Counter("holdfast_resumed_turns", "Turns resumed here, of routers that were lost", registry=r)
        self.failovers = Counter("holdfast_failovers", "Live turns failed over from a lost worker", registry=r)
        self.recomputed = Counter(
            "holdfast_recomputed_tokens",
            "Tokens of sessions' histories that were computed again: failover (their worker was lost), moved (another "
            "worker was chosen), evicted (from a worker that they had been on)",
            ["reason"],
            registry=r,
        )
        self.migrations = Counter(
            "holdfast_migrations",
            "Session migrations: migrated with their KV, or refused",
            ["outcome"],
            registry=r,
        )
        self.migration_bytes = Counter("holdfast_migration_bytes", "KV migrated with sessions, all ranks", registry=r)
        self.failover = Histogram(
            "holdfast_failover_seconds",
            "Stages of a failover: place (choose and journal the new pin), first_token (submit to next token)",
            ["stage"],
            buckets=TTFT_BUCKETS,
            registry=r,
        )
        self.ttft = Histogram(
            "holdfast_time_to_first_token_seconds", "From request to first token", buckets=TTFT_BUCKETS, registry=r
        )
        self.inter_token = Histogram(
            "holdfast_inter_token_seconds", "Between a turn's tokens", buckets=INTER_TOKEN_BUCKETS, registry=r
        )

    def recomputed_by_reason(self) -> dict[str, int]:
        """Tokens that were computed again since this router started."""
        samples = [sample for metric in self.recomputed.collect() for sample in metric.samples]
        totals = {s.labels["reason"]: int(s.value) for s in samples if s.name.endswith("_total")}
        return {reason: totals.get(reason, 0) for reason in RECOMPUTED_REASONS}

    def observe_tokens(self, count: int, after_s: float, first: bool) -> None:
        """``count`` tokens of a turn arrived, ``after_s`` after the request or the tokens before them."""
        self.tokens.inc(count)
        (self.ttft if first else self.inter_token).observe(after_s)

    def watch(
        self,
        workers: Callable[[], list[worker_pb2.WorkerStats]],
        live_turns: Callable[[], int],
        sessions: Callable[[], int],
        degraded: Callable[[], str],
    ) -> None:
        self.registry.register(WorkerCollector(workers))
        self.registry.register(_Live(lambda: len(workers()), live_turns, sessions, degraded))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Live(Collector):
    """Gauges that are read at each scrape."""

    def __init__(
        self,
        alive: Callable[[], int],
        live_turns: Callable[[], int],
        sessions: Callable[[], int],
        degraded: Callable[[], str],
    ) -> None:
        self._alive, self._live_turns, self._sessions, self._degraded = alive, live_turns, sessions, degraded

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "holdfast_live_turns", "Turns running or waiting on this router", value=self._live_turns()
        )
        yield GaugeMetricFamily("holdfast_router_sessions", "Sessions in this router's memory", value=self._sessions())
        yield GaugeMetricFamily("holdfast_workers_alive", "Workers that this router reaches", value=self._alive())
        yield GaugeMetricFamily(
            "holdfast_control_plane_reachable",
            "1 while what starts workers again can be reached, else 0",
            value=not self._degraded(),
        )
