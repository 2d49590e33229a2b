"""A worker's own Prometheus endpoint."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server

from holdfast.v1 import worker_pb2
from holdfast.worker_metrics import WorkerCollector


class MetricsServer:
    """Serves the metrics of one worker on a free port of ``host``, in a thread."""

    def __init__(self, host: str, stats: Callable[[], worker_pb2.WorkerStats]) -> None:
        registry = CollectorRegistry()
        registry.register(WorkerCollector(lambda: [stats()]))
        self._server, self._thread = start_http_server(0, host, registry)
        self._address = (host, self._server.server_port)
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def stop(self) -> None:
        """End the thread. It looks for a reason to end twice a second, and at each connection: so make one."""
        ending = threading.Thread(target=self._server.shutdown)
        ending.start()
        socket.create_connection(self._address).close()
        ending.join()
        self._thread.join()
        self._server.server_close()
