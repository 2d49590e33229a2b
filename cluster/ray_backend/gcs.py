"""Ray's GCS on this machine is started again when it dies or hangs.

Its state lies on the disk (``nodes.gcs_storage``). A GCS that finds the state of the one before it, at the same
address, goes on with the same nodes, actors and placement groups; routers and ranks do not notice. Where the state is
lost too, no GCS is started at that address: all that runs there would end, as it is another cluster's. It serves on
without one, and is handed over to a Ray node beside it (``succession``).
"""

from __future__ import annotations

import contextlib
import logging
import socket
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
LOST = "has another cluster's state"
NUM_FAILED_STARTS = 5
"""Starts in a row of which none answers, after which one is tried without the state on the disk."""
WITNESS = "CURRENT"
"""A file that each database of RocksDB has."""
TRIAL_S = 10.0
STOP_TIMEOUT_S = 5.0


class GcsKeeper:
    """Keeps the GCS running that this process has started. Call after ``ray.init``.

    It works in a thread: calls of Ray's API block the event loop for as long as there is no GCS.

    ``on_lost`` is called there when its state is lost, so that none can be started that knows what runs. Nothing keeps
    it then. ``on_another``: as well, with the reason, when one was started without that state all the same.
    """

    def __init__(self, on_lost: Callable[[], object], on_another: Callable[[str], None]) -> None:
        self._on_lost, self._on_another = on_lost, on_another
        self._address = ray.get_runtime_context().gcs_address
        self._cluster_id: Any = None
        self._num_failed = 0
        self.process: psutil.Process
        """The GCS that runs now, or ran last."""
        (self.process,) = (child for child in psutil.Process().children() if child.name() == "gcs_server")
        self._command = self.process.cmdline()
        self._environment: dict[str, str] = self.process.environ()
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
            if reason == LOST:
                self._on_another(f"the GCS was started again, and it {reason}")
                return
            if not self._stopped.is_set():
                log.warning("the GCS %s; starting it again", reason)
                try:
                    self._end()
                    if self._state_is_lost():
                        log.error("the state of the GCS is lost")
                        self._on_lost()
                        return
                    self.process = self._start(self._address, self._environment)
                except (OSError, psutil.Error):
                    log.exception("the GCS does not start; retrying")
                self._stopped.wait(CHECK_EVERY_S)  # one that cannot start does not spin

    def _failure(self) -> str:
        """Returns, with the reason, when the GCS must be started again, or when this was stopped."""
        num_unanswered, is_known = 0, False
        self._num_failed += 1  # until it answers
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
                if num_unanswered == 0 and not is_known:
                    self._num_failed = 0
                    if self._is_another_cluster():
                        return LOST
                    is_known = True
                self._stopped.wait(CHECK_EVERY_S)
                answer = check.future(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        return "is kept no longer"

    def _is_another_cluster(self) -> bool:
        """Whether the GCS has named its cluster anew, as one does that finds no state.

        A client of its own asks: those that know another id end their process when the GCS refuses them for it.
        """
        try:
            found = GcsClient(address=self._address).cluster_id
        except RayError:
            return False  # it has died since
        if self._cluster_id is None:
            self._cluster_id = found
        return bool(found != self._cluster_id)

    def _state_is_lost(self) -> bool:
        """Whether there is none on the disk, or one that no GCS starts with.

        What does not run without the state either does not fail for its state, as on a full disk, and finds it when
        there is room again.
        """
        storage = self._environment.get(STORAGE_PATH)
        if storage is None:
            return False  # it is in a Redis, which is looked after elsewhere
        if not any(Path(storage).rglob(WITNESS)):
            return True
        if not self._num_failed or self._num_failed % NUM_FAILED_STARTS:
            return False
        log.error("the GCS has not started %d times; trying one without its state", self._num_failed)
        return self._runs_without_state(Path(storage).parent)

    def _runs_without_state(self, folders: Path) -> bool:
        """At another address, where nothing that runs finds it."""
        with tempfile.TemporaryDirectory(dir=folders) as folder:
            with socket.create_server((self._address.rpartition(":")[0], 0)) as free:
                address = f"{free.getsockname()[0]}:{free.getsockname()[1]}"
            trial = self._start(address, self._environment | {STORAGE_PATH: folder})
            try:
                with grpc.insecure_channel(address) as channel:
                    grpc.channel_ready_future(channel).result(TRIAL_S)
                return runs(trial)
            except grpc.FutureTimeoutError:
                return False
            finally:
                trial.kill()
                trial.wait(STOP_TIMEOUT_S)

    def _end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()  # one that hangs has the port, and the storage's lock
            self.process.wait(STOP_TIMEOUT_S)

    def _start(self, address: str, environment: dict[str, str]) -> psutil.Popen:
        port = f"--gcs_server_port={address.rpartition(':')[2]}"
        command = [port if word.startswith("--gcs_server_port=") else word for word in self._command]
        quiet = subprocess.DEVNULL
        return psutil.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet)
