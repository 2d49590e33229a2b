"""Every error a caller of Holdfast can get, and the one place that maps it to a status.

A class for each thing that a caller can *do* about it. The message is written in the caller's terms;
``code`` is stable and machine readable. The mapping to gRPC codes is by name so that the pure core
can raise these without importing grpc.
"""

from __future__ import annotations

from typing import ClassVar


class HoldfastError(Exception):
    """Base of all errors. Raised itself only for faults of ours: the caller may try again."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    retry_after_s: float | None = None

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.code


class InvalidRequest(HoldfastError):
    """The request can never succeed as it stands; change it."""

    code = "invalid_request"
    http_status = 400
    grpc_code = "INVALID_ARGUMENT"


class PromptTooLong(InvalidRequest):
    """Prompt (and what was asked to be generated) do not fit; shorten it or rewind the session."""

    code = "context_length_exceeded"


class RequestTooLarge(InvalidRequest):
    """The request has more bytes than one may have."""

    code = "request_too_large"
    http_status = 413


class Unauthenticated(HoldfastError):
    """No valid API key came with the request."""

    code = "invalid_api_key"
    http_status = 401
    grpc_code = "UNAUTHENTICATED"


class SessionNotFound(HoldfastError):
    """No such session (for this tenant); open it first."""

    code = "session_not_found"
    http_status = 404
    grpc_code = "NOT_FOUND"


class SessionReleased(SessionNotFound):
    """The session was released and never comes back (law L12); open another."""

    code = "session_released"


class WorkerNotFound(HoldfastError):
    """No living worker has that name; ``holdfast status`` lists them."""

    code = "worker_not_found"
    http_status = 404
    grpc_code = "NOT_FOUND"


class TurnNotFound(HoldfastError):
    """The turn neither runs nor is its session's last: there is nothing to resume; send it again."""

    code = "turn_not_found"
    http_status = 404
    grpc_code = "NOT_FOUND"


class ResponseNotFound(HoldfastError):
    """No such response, conversation or item (for this tenant), or it was deleted."""

    code = "not_found"
    http_status = 404
    grpc_code = "NOT_FOUND"


class ModelNotFound(HoldfastError):
    """The request names a model that is not served here."""

    code = "model_not_found"
    http_status = 404
    grpc_code = "NOT_FOUND"


class SessionBusy(HoldfastError):
    """Another turn runs on this session; wait for it, abort it or release the session."""

    code = "session_busy"
    http_status = 409
    grpc_code = "ABORTED"


class SessionExists(HoldfastError):
    """A session of that id is there already (possibly another tenant's)."""

    code = "session_exists"
    http_status = 409
    grpc_code = "ALREADY_EXISTS"


class StaleEpoch(HoldfastError):
    """The caller acts under an epoch that has passed: the session has another owner (law L11)."""

    code = "stale_epoch"
    http_status = 409
    grpc_code = "FAILED_PRECONDITION"


class QueueFull(HoldfastError):
    """Too much is waiting; try again after ``retry_after_s``."""

    code = "queue_full"
    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    retry_after_s = 1.0


class TooManySessions(QueueFull):
    """The tenant has as many open sessions as it may; release some."""

    code = "too_many_sessions"


class OutOfPages(HoldfastError):
    """The KV pool cannot hold this now; raised inside a worker, the scheduler makes the turn wait."""

    code = "out_of_pages"
    http_status = 503
    grpc_code = "RESOURCE_EXHAUSTED"
    retry_after_s = 1.0


class HandoverRefused(HoldfastError):
    """A session's KV stays where it is: its tokens are computed again at its next turn, elsewhere."""

    code = "handover_refused"
    http_status = 409
    grpc_code = "FAILED_PRECONDITION"


class NoWorkerAvailable(HoldfastError):
    """No worker can take the turn; one may be restarting."""

    code = "no_worker_available"
    http_status = 503
    grpc_code = "UNAVAILABLE"
    retry_after_s = 5.0


class DeadlineExceeded(HoldfastError):
    """The deadline of the request passed before it was done."""

    code = "deadline_exceeded"
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"


class TurnFailed(HoldfastError):
    """Worker after worker was lost under the turn: perhaps it is what ends them. The session goes on without it."""

    code = "turn_failed"


class RankDiverged(HoldfastError):
    """A rank does not hold its leader's state; its worker ends before a token of that step leaves it."""

    code = "rank_diverged"


class JournalUnavailable(HoldfastError):
    """The journal cannot be written, so nothing new may be shown; nothing shown is lost."""

    code = "journal_unavailable"
    http_status = 503
    grpc_code = "UNAVAILABLE"
    retry_after_s = 1.0


class UnsupportedModel(HoldfastError):
    """A checkpoint asks for what the engine does not have; names the field and what is supported."""

    code = "unsupported_model"
    http_status = 400
    grpc_code = "FAILED_PRECONDITION"


class ConfigError(HoldfastError):
    """The configuration is wrong; names the key."""

    code = "config_error"
    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
