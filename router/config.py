"""A router's settings, with the reason for each limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.access.keys import StoredKey
from router.journal.interface import MAX_SESSIONS_PER_TENANT, TOMBSTONE_RETENTION_S


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of one router. Times in seconds."""

    model: Path
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 50051
    tool_call_parser: str | None = None
    """How the model writes calls of tools. None: as its chat template shows."""
    reasoning_parser: str | None = None
    """How the model writes reasoning. None: as its chat template shows."""
    api_keys: tuple[StoredKey, ...] = ()
    """What is kept of the keys that are accepted."""
    api_key_file: Path | None = None
    """More keys. No keys and no file: no authentication, one tenant."""
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    """TLS for clients, over HTTP and gRPC; both or neither."""
    control_plane: str = ""
    """Address of what starts processes again, to say when it does not answer. Empty: not watched."""
    audit_log: Path | None = None
    """What operators do is written there."""
    otlp_traces_endpoint: str | None = None
    """Turns' traces are sent there."""
    journal_path: Path = Path("holdfast.db")
    journal_url: str | None = None
    """A Redis instead of the SQLite file: for routers on several machines."""
    journal_durability: str = "process"
    """``process``: a shown token survives any kill -9. ``power``: it is fsynced first."""
    max_live_turns: int = 256
    """Turns that run or wait on this router. Beyond it: 429."""
    max_turns_per_tenant: int | None = None
    """The same of one tenant. None: half of all if there are several tenants, else all."""
    max_sessions_per_tenant: int = MAX_SESSIONS_PER_TENANT
    """Open sessions of one tenant. Beyond it: 429."""
    tombstone_retention_s: float = TOMBSTONE_RETENTION_S
    """How long the id of a released session cannot be used again."""
    max_message_bytes: int = 16 * 1024 * 1024
    """Size of a request. Beyond it: 413 (gRPC: RESOURCE_EXHAUSTED). A million tokens are 4 MB, about 7 MB as JSON.
    Parsing 16 MB of JSON numbers takes over a second, during which nothing else on the router runs."""
    max_file_bytes: int = 100 * 1024 * 1024
    """Size of a file for batches. Beyond it: 413."""
    max_connections: int = 8192
    """Open HTTP connections. Beyond it: a new one is answered 503."""
    client_timeout_s: float = 30.0
    """How long a client may take to send a request, more for a long one, and to read what it is sent. Beyond it: 408,
    or the connection is cut, as if the client had left."""
    turn_deadline_s: float = 3600.0
    """Total duration of a turn. Beyond it: 504."""
    max_queued_turns_per_session: int = 16
    """Turns that wait for their session's running turn. Beyond it: 429."""
    worker_lease_s: float = 2.0
    """Silence after which a worker is considered lost. A broken stream is noticed at once."""
    worker_wait_s: float = 20.0
    """How long a turn waits for a living worker: about as long as a worker's restart. Beyond it: 503."""
    token_timeout_s: float = 120.0
    """How long a turn waits for its next token, including queueing. Beyond it: 504."""
    max_failovers: int = 4
    """Failovers of a turn without a token in between. Beyond it: 500. Such a turn may itself be what kills the
    workers, and would kill all of them."""
    control_timeout_s: float = 10.0
    """Deadline of Release, FreeTail, Fork and Audit calls to a worker."""
    migration_timeout_s: float = 60.0
    """How long a drain migrates KV. The KV of the remaining sessions is computed at their next turns."""
    drain_timeout_s: float = 5.0
    """How long live turns may continue when the router is stopped."""
