"""What all simulated processes share: time, network, disk, and the violations that were found."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from router.config import RouterConfig
from router.journal.sqlite_file import SCHEMA
from tests.simulation.disk import Disk, SimulatedJournal
from tests.simulation.loop import PROCESS, Process, SimulatedLoop
from tests.simulation.network import Network
from workers.config import EngineConfig

ENGINE = EngineConfig(
    page_size=4,
    context_length=120,
    max_total_tokens=240,
    chunked_prefill_size=24,
    max_running_requests=4,
    max_queued_requests=6,
    max_sessions=12,
    speculative_num_draft_tokens=6,
    kv_store_write_mb_per_s=0.002,  # a page waits so long that it may be evicted meanwhile
)
ROUTER = RouterConfig(
    model=Path(),
    served_model_name="simulated",
    max_live_turns=16,
    max_queued_turns_per_session=4,
    worker_wait_s=8.0,
    token_timeout_s=15.0,
    control_timeout_s=4.0,
)


class World:
    """The simulated world of one cluster."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random, trace: Callable[[str], None]) -> None:
        self.loop, self.rng, self.trace = loop, rng, trace
        self.network = Network(rng)
        self.disk = Disk(rng)
        self.disk.db.executescript(SCHEMA)
        self.engine_config, self.router_config = ENGINE, ROUTER
        self.supervisors: list[Process] = []
        self.owners: dict[tuple[str, int], str] = {}
        self.pins: dict[tuple[str, int], str] = {}
        self.violations: list[str] = []
        self.sessions_migrated = 0
        self.drained: set[str] = set()
        """Workers of a generation before whose sessions have had the chance to migrate."""
        self.keys_change = False
        """Whether the API keys are changed now and then, so that turns come in other scopes and with other shares."""
        self.disturbed = False
        """Whether a fault was injected, or clocks differ, which makes leases expire early."""
        self.held_up = False
        """Whether anything may have arrived much later than it was sent."""

    def violated(self, what: str) -> None:
        self.trace(f"VIOLATION {what}")
        self.violations.append(what)

    def kill(self, process: Process) -> None:
        if process.alive:
            self.trace(f"{process.name} is killed")
            self.network.kill(process)

    def reaches(self, process: Process) -> bool:
        """Whether the host of the supervisor that asks and a process's host reach each other."""
        asking = PROCESS.get()
        hosts = (asking.host if asking is not None else "", process.host)
        return self.network.is_whole(*hosts) and self.network.is_whole(*reversed(hosts))

    def journal(self, router: str) -> SimulatedJournal:
        return SimulatedJournal(self.disk, router, self._wrote)

    def submitted(self, worker: str, session_id: str, epoch: int) -> None:
        """Law L11: under one epoch, a session has one worker. So a worker can tell what was sent before it left."""
        pin = self.pins.setdefault((session_id, epoch), worker)
        if pin != worker:
            self.violated(f"L11: {session_id} has turns on {pin} and {worker} under epoch {epoch}")

    def _wrote(self, router_name: str, session_id: str, epoch: int) -> None:
        """Law L11: under one epoch, one router writes."""
        owner = self.owners.setdefault((session_id, epoch), router_name)
        if owner != router_name:
            self.violated(f"L11: {router_name} and {owner} both wrote to {session_id} under epoch {epoch}")
