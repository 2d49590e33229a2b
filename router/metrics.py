"""Prometheus metrics of a router, and of its workers as their beats tell them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.v1 import worker_pb2

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
INTER_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """One registry a router: several may live in one process, as in tests."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.turns = Counter("holdfast_turns", "Turns ended, by reason", ["reason"], registry=r)
        self.tokens = Counter("holdfast_output_tokens", "Tokens shown to clients", registry=r)
        self.rejected = Counter("holdfast_rejected_turns", "Turns refused with 429", registry=r)
        self.failovers = Counter("holdfast_failovers", "Live turns moved off a lost worker", registry=r)
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

    def saw_tokens(self, count: int, after_s: float, first: bool) -> None:
        self.tokens.inc(count)
        (self.ttft if first else self.inter_token).observe(after_s)

    def watch_gateway(
        self,
        workers: Callable[[], list[worker_pb2.WorkerStats]],
        live_turns: Callable[[], int],
        sessions: Callable[[], int],
    ) -> None:
        self.registry.register(_Live(workers, live_turns, sessions))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Live(Collector):
    """What is read at the moment of a scrape."""

    def __init__(
        self,
        workers: Callable[[], list[worker_pb2.WorkerStats]],
        live_turns: Callable[[], int],
        sessions: Callable[[], int],
    ) -> None:
        self._workers, self._live_turns, self._sessions = workers, live_turns, sessions

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("holdfast_live_turns", "Turns running or waiting here", value=self._live_turns())
        yield GaugeMetricFamily("holdfast_router_sessions", "Sessions in this router's memory", value=self._sessions())
        stats = self._workers()
        yield GaugeMetricFamily("holdfast_workers_alive", "Workers that this router reaches", value=len(stats))
        pages = GaugeMetricFamily("holdfast_worker_pages", "KV pages by state", labels=["worker", "state"])
        gauges = {
            name: GaugeMetricFamily(f"holdfast_worker_{name}", text, labels=["worker"])
            for name, text in (
                ("sessions", "Sessions with a slot on the worker"),
                ("running", "Turns in the worker's batch"),
                ("waiting", "Turns queued on the worker"),
            )
        }
        retracted = CounterMetricFamily("holdfast_worker_retracted", "Turns retracted for pages", labels=["worker"])
        counters = CounterMetricFamily("holdfast_worker_events", "Counts of the engine", labels=["worker", "event"])
        for s in stats:
            for state, value in (("free", s.pages_free), ("cached", s.pages_cached), ("held", s.pages_held)):
                pages.add_metric([s.worker_id, state], value)
            for name, gauge in gauges.items():
                gauge.add_metric([s.worker_id], getattr(s, name))
            retracted.add_metric([s.worker_id], s.retracted)
            for event, count in s.counters.items():
                counters.add_metric([s.worker_id, event], count)
        yield from (pages, *gauges.values(), retracted, counters)
