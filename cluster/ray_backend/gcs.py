"""Ray's GCS on this machine is started again when it dies or hangs.

Its state lies on the disk (``nodes.gcs_storage``). A GCS that finds the state of the one before it, at the same
address, goes on with the same nodes, actors and placement groups; routers and ranks do not notice. Where the state is
lost too, nothing that runs could be found or started again: the node is started anew.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # its stub lacks it
from ray.exceptions import RayError

from cluster.ray_backend.nodes import STORAGE_PATH
from cluster.ray_backend.processes import runs
from router.control_plane import CHECK_EVERY_S, SILENT, TIMEOUT_S

log = logging.getLogger("holdfast.cluster")
POLL_S = 0.2
NUM_UNANSWERED = 10
"""Checks in a row without an answer, each of ``TIMEOUT_S``, after which a GCS hangs."""
LOST = "has lost its state"
NUM_FAILED_STARTS = 5
"""Starts in a row of which none answers, after which the state on the disk is taken for damaged."""
STOP_TIMEOUT_S = 5.0


class GcsKeeper:
    """Keeps the GCS running that this process has started. Call after ``ray.init``.

    It works in a thread: calls of Ray's API block the event loop for as long as there is no GCS.

    ``on_lost`` is called there, with the reason, when a GCS was started again without the state of the one before it.
    Nothing keeps it then.
    """

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._address = ray.get_runtime_context().gcs_address
        self._cluster_id = self._id_of_cluster()
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
        num_starts = 0
        while not self._stopped.is_set():
            reason, answered = self._failure()
            if reason == LOST:
                self._on_lost("the GCS was started again, and its state is lost")
                return
            num_starts = 1 if answered else num_starts + 1
            if not self._stopped.is_set():
                log.warning("the GCS %s; starting it again", reason)
                try:
                    if num_starts % NUM_FAILED_STARTS == 0:
                        self._forget_state()
                    self._start()
                except (OSError, psutil.Error):
                    log.exception("the GCS does not start; retrying")
                self._stopped.wait(CHECK_EVERY_S)  # one that cannot start does not spin

    def _failure(self) -> tuple[str, bool]:
        """Returns when the GCS must be started again, or when this was stopped: why, and whether it has answered."""
        num_unanswered, answered = 0, False
        with grpc.insecure_channel(self._address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = check.future(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            while not self._stopped.wait(POLL_S):
                if not runs(self.process):
                    return "died", answered
                if not answer.done():
                    continue
                num_unanswered = num_unanswered + 1 if answer.code() in SILENT else 0
                if num_unanswered == NUM_UNANSWERED:
                    return "does not answer", answered
                if num_unanswered == 0 and not answered:
                    if self._id_of_cluster() not in (self._cluster_id, None):
                        return LOST, True
                    answered = True
                self._stopped.wait(CHECK_EVERY_S)
                answer = check.future(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        return "is kept no longer", answered

    def _id_of_cluster(self) -> Any:
        """What the GCS has named its cluster when it had no state; None: it does not say.

        Of a client of its own: those that know another id end their process when the GCS refuses them for it.
        """
        with contextlib.suppress(RayError):
            return GcsClient(address=self._address).cluster_id
        return None

    def _forget_state(self) -> None:
        """Start it with an empty folder from now on. What does not run even then does not fail for its state."""
        if STORAGE_PATH in self._environment:  # else it is not a folder
            log.error("the GCS has not started %d times; starting it without its state", NUM_FAILED_STARTS)
            folder = Path(self._environment[STORAGE_PATH]).parent
            folder.mkdir(parents=True, exist_ok=True)
            self._environment[STORAGE_PATH] = tempfile.mkdtemp(dir=folder)

    def _start(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()  # one that hangs has the port, and the storage's lock
            self.process.wait(STOP_TIMEOUT_S)
        quiet = subprocess.DEVNULL
        self.process = psutil.Popen(self._command, env=self._environment, stdin=quiet, stdout=quiet, stderr=quiet)
