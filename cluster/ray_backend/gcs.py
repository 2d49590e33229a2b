"""Ray's GCS on this machine is started again when it dies or hangs.

Its state lies on the disk (``nodes.gcs_storage``). A GCS that finds the state of the one before it, at the same
address, goes on with the same nodes, actors and placement groups; routers and ranks do not notice.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading

import grpc
import psutil
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.ray_backend.processes import runs
from router.control_plane import CHECK_EVERY_S, SILENT, TIMEOUT_S

log = logging.getLogger("holdfast.cluster")
POLL_S = 0.2
NUM_UNANSWERED = 10
"""Checks in a row without an answer, each of ``TIMEOUT_S``, after which a GCS hangs."""
STOP_TIMEOUT_S = 5.0


class GcsKeeper:
    """Keeps the GCS running that this process has started. Call after ``ray.init``.

    It works in a thread: calls of Ray's API block the event loop for as long as there is no GCS.
    """

    def __init__(self) -> None:
        self._address = ray.get_runtime_context().gcs_address
        self.process: psutil.Process
        """The GCS that runs now, or ran last."""
        (self.process,) = (child for child in psutil.Process().children() if child.name() == "gcs_server")
        port = f"--gcs_server_port={self._address.rpartition(':')[2]}"
        words = self.process.cmdline()
        self._command = [port if word.startswith("--gcs_server_port=") else word for word in words]
        self._environment = self.process.environ()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="gcs-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop keeping it. It runs on."""
        self._stopped.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _keep(self) -> None:
        while not self._stopped.is_set():
            reason = self._failure()
            if not self._stopped.is_set():
                log.warning("the GCS %s; starting it again", reason)
                try:
                    self._start()
                except (OSError, psutil.Error):
                    log.exception("the GCS does not start; retrying")
                self._stopped.wait(CHECK_EVERY_S)  # one that cannot start does not spin

    def _failure(self) -> str:
        """Returns, with the reason, when the GCS must be started again, or when this was stopped."""
        num_unanswered = 0
        with grpc.insecure_channel(self._address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = check.future(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            while not self._stopped.wait(POLL_S):
                if not runs(self.process):
                    return "died"
                if not answer.done():
                    continue
                num_unanswered = num_unanswered + 1 if answer.code() in SILENT else 0
                if num_unanswered == NUM_UNANSWERED:
                    return "does not answer"
                self._stopped.wait(CHECK_EVERY_S)
                answer = check.future(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        return "is kept no longer"

    def _start(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()  # one that hangs has the port, and the storage's lock
            self.process.wait(STOP_TIMEOUT_S)
        quiet = subprocess.DEVNULL
        self.process = psutil.Popen(self._command, env=self._environment, stdin=quiet, stdout=quiet, stderr=quiet)
