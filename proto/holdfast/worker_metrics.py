"""Worker statistics as Prometheus metrics. A worker serves its own, a router those of all its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.v1 import worker_pb2


class WorkerCollector(Collector):
    """Calls ``stats`` at each scrape."""

    def __init__(self, stats: Callable[[], Iterable[worker_pb2.WorkerStats]]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        pages = GaugeMetricFamily(
            "holdfast_worker_pages", "KV pages by group and state", labels=["worker", "group", "state"]
        )
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
        store_bytes = GaugeMetricFamily(
            "holdfast_kv_store_bytes", "Memory and disk of the KV store of a worker's node", labels=["worker", "state"]
        )
        store_copies = GaugeMetricFamily(
            "holdfast_kv_store_copies", "Copies of pages in the KV store of a worker's node", labels=["worker"]
        )
        store_events = CounterMetricFamily(
            "holdfast_kv_store_events", "Counts of the KV store of a worker's node", labels=["worker", "event"]
        )
        lag = GaugeMetricFamily(
            "holdfast_rank_lag_entries", "Entries of the step log sent and not acked", labels=["worker", "rank"]
        )
        for s in self._stats():
            for group in s.groups:
                for state, value in (("free", group.free), ("cached", group.cached), ("held", group.held)):
                    pages.add_metric([s.worker_id, group.group, state], value)
            for name, gauge in gauges.items():
                gauge.add_metric([s.worker_id], getattr(s, name))
            retracted.add_metric([s.worker_id], s.retracted)
            for event, count in s.counters.items():
                counters.add_metric([s.worker_id, event], count)
            if s.HasField("kv_store"):
                store_bytes.add_metric([s.worker_id, "total"], s.kv_store.bytes_total)
                store_bytes.add_metric([s.worker_id, "used"], s.kv_store.bytes_used)
                store_bytes.add_metric([s.worker_id, "on_disk"], s.kv_store.disk_bytes_used)
                for event, count in s.kv_store.counters.items():
                    store_events.add_metric([s.worker_id, event], count)
                store_copies.add_metric([s.worker_id], s.kv_store.copies)
            for rank in s.ranks:
                lag.add_metric([s.worker_id, str(rank.rank)], rank.lag)
        yield from (pages, *gauges.values(), retracted, counters, store_bytes, store_copies, store_events, lag)
