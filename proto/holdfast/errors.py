"""Every error that a caller of Holdfast can get, with its HTTP status and gRPC code.

There is one class for each thing that a caller can *do* about an error. The message is in the caller's
terms; ``code`` is stable and machine readable. gRPC codes are given by name, so that the pure core can
raise these errors without importing grpc.
"""

from __future__ import annotations

from typing import ClassVar

from holdfast.names import without_tenants


class HoldfastError(Exception):
    """Base of all errors. Raised directly only for internal faults: the caller may retry."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    retry_after_s: float | None = None
    param: str | None = None
    """The request's parameter that is wrong, if it is one."""

    @property
    def message(self) -> str:
        return without_tenants(str(self.args[0])) if self.args else self.code


class InvalidRequest(HoldfastError):
    """The request cannot succeed as it is; change it."""

    code = "invalid_request"
    http_status = 400
    grpc_code = "INVALID_ARGUMENT"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedParameter(InvalidRequest):
    """Holdfast does not support a parameter of the request, or the value it has."""

    code = "unsupported_parameter"


class PromptTooLong(InvalidRequest):
    """The input does not fit into the context; shorten it or rewind the session."""

    code = "context_length_exceeded"


class PreviousResponseNotFound(InvalidRequest):
    """The response that a request continues does not exist (for this tenant), or was deleted. OpenAI's code, by which
    clients know to send the whole history instead."""

    code = "previous_response_not_found"


class RequestTooLarge(InvalidRequest):
    """The request's body is larger than ``max_message_bytes``."""

    code = "request_too_large"
    http_status = 413


class Unauthenticated(HoldfastError):
    """No valid API key came with the request."""

    code = "invalid_api_key"
    http_status = 401
    grpc_code = "UNAUTHENTICATED"


class Forbidden(HoldfastError):
    """The key is valid, but lacks the role that this needs."""

    code = "permission_denied"
    http_status = 403
    grpc_code = "PERMISSION_DENIED"


class SessionNotFound(HoldfastError):
    """No such session (for this tenant); open it first."""

    code = "session_not_found"
    http_status = 404
    grpc_code = "NOT_FOUND"


class SessionReleased(SessionNotFound):
    """The session was released, permanently (law L12); open another."""

    code = "session_released"


class WorkerNotFound(HoldfastError):
    """No living worker has that name; ``holdfast status`` lists them."""

    code = "worker_not_found"
    http_status = 404
    grpc_code = "NOT_FOUND"


class TurnNotFound(HoldfastError):
    """The turn is neither running nor its session's last: it cannot be resumed; send it again."""

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
    """A session with that id exists already (possibly another tenant's)."""

    code = "session_exists"
    http_status = 409
    grpc_code = "ALREADY_EXISTS"


class StaleEpoch(HoldfastError):
    """The caller's epoch has passed: the session has another owner (law L11), or the cluster another supervisor."""

    code = "stale_epoch"
    http_status = 409
    grpc_code = "FAILED_PRECONDITION"


class QueueFull(HoldfastError):
    """A queue is full; retry after ``retry_after_s``."""

    code = "queue_full"
    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    retry_after_s = 1.0


class TooManyTokens(QueueFull):
    """The tenant has used its tokens of this minute."""

    code = "too_many_tokens"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooManySessions(QueueFull):
    """The tenant has reached its limit of open sessions; release some."""

    code = "too_many_sessions"


class TooManyFiles(QueueFull):
    """The tenant has reached its limit of files, or of open batches; delete some, or wait."""

    code = "too_many_files"


class OutOfPages(HoldfastError):
    """The KV pool has no room now. Raised inside a worker, where the scheduler makes the turn wait."""

    code = "out_of_pages"
    http_status = 503
    grpc_code = "RESOURCE_EXHAUSTED"
    retry_after_s = 1.0


class MigrationRefused(HoldfastError):
    """A session's KV is not migrated; its next turn on another worker computes its tokens again."""

    code = "migration_refused"
    http_status = 409
    grpc_code = "FAILED_PRECONDITION"


class NoWorkerAvailable(HoldfastError):
    """No worker can take the turn; one may be restarting."""

    code = "no_worker_available"
    http_status = 503
    grpc_code = "UNAVAILABLE"
    retry_after_s = 5.0


class IncompatibleVersion(NoWorkerAvailable):
    """Two processes of a cluster whose versions of Holdfast are too far apart to talk."""

    code = "incompatible_version"
    grpc_code = "FAILED_PRECONDITION"


class DeadlineExceeded(HoldfastError):
    """The deadline of the request passed before it was done."""

    code = "deadline_exceeded"
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"


class TurnFailed(HoldfastError):
    """The turn failed over more than ``max_failovers`` times without producing a token; it may be the cause."""

    code = "turn_failed"


class RankDiverged(HoldfastError):
    """A rank's state differs from its leader's. The worker ends before it sends a token of that step."""

    code = "rank_diverged"


class JournalUnavailable(HoldfastError):
    """The journal cannot be written, so no new token can be shown. No token that was shown is lost."""

    code = "journal_unavailable"
    http_status = 503
    grpc_code = "UNAVAILABLE"
    retry_after_s = 1.0


class UnsupportedModel(HoldfastError):
    """The engine does not support the checkpoint; names the field and the supported values."""

    code = "unsupported_model"
    http_status = 400
    grpc_code = "FAILED_PRECONDITION"


class ConfigError(HoldfastError):
    """The configuration is wrong; names the key."""

    code = "config_error"
    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
