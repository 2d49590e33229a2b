"""What a router is told at its start, with the reason of each limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.journal import MAX_SESSIONS_PER_TENANT, TOMBSTONE_RETENTION_S


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router. Times in seconds."""

    model: Path
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 50051
    api_keys: tuple[str, ...] = ()
    """Empty: open to all, one tenant. Else each key is a tenant."""
    journal_path: Path = Path("holdfast.db")
    journal_url: str | None = None
    """A Redis in place of the SQLite file: for routers on several machines."""
    journal_durability: str = "process"
    """``process``: a shown token survives any kill -9. ``power``: it is fsynced first."""
    max_live_turns: int = 256
    """Turns that run or wait on this router; more get 429."""
    max_turns_per_tenant: int | None = None
    """Of those, one tenant's. None: half of them where there are several tenants, else all."""
    max_sessions_per_tenant: int = MAX_SESSIONS_PER_TENANT
    """Sessions that a tenant may have open; more get 429."""
    tombstone_retention_s: float = TOMBSTONE_RETENTION_S
    """How long a released session's id stays gone."""
    max_message_bytes: int = 16 * 1024 * 1024
    """A request's size; a larger one gets 413 (gRPC: RESOURCE_EXHAUSTED). A million tokens are 4 MB, as JSON
    about 7. Numbers in 16 MB of JSON take over a second to read, in which nothing else of the router runs."""
    turn_deadline_s: float = 3600.0
    """How long a turn may take altogether before it gets 504."""
    max_queued_turns_per_session: int = 16
    """Turns that wait for the one that runs on their session; more get 429."""
    worker_lease_s: float = 2.0
    """A worker that is silent for so long is taken for dead (a broken stream is seen at once)."""
    worker_wait_s: float = 20.0
    """How long a turn waits for some worker to live before it gets 503: about a worker's restart."""
    token_timeout_s: float = 120.0
    """How long a turn waits for its next token, queueing included, before it gets 504."""
    max_failovers: int = 4
    """Workers that a turn may lose one after another, with no token from it between; then it gets 500. It
    may be what ends them, and would end all there are."""
    control_timeout_s: float = 10.0
    """Deadline of Release, FreeTail, Fork and Audit calls to a worker."""
    handover_timeout_s: float = 60.0
    """How long a drain goes on handing KV over; what has not moved by then is computed again."""
    drain_timeout_s: float = 5.0
    """How long live turns may go on when the router is stopped."""

    @property
    def tenant_turns(self) -> int:
        """How many turns of one tenant may run or wait."""
        if self.max_turns_per_tenant is not None:
            return self.max_turns_per_tenant
        return self.max_live_turns if len(self.api_keys) < 2 else -(-self.max_live_turns // 2)
