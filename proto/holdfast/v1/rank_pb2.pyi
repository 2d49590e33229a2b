from holdfast.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaderMessage(_message.Message):
    __slots__ = ("beat", "entry")
    BEAT_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    beat: Beat
    entry: Entry
    def __init__(self, beat: _Optional[_Union[Beat, _Mapping]] = ..., entry: _Optional[_Union[Entry, _Mapping]] = ...) -> None: ...

class RankMessage(_message.Message):
    __slots__ = ("hello", "beat", "ack", "refusal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    beat: Beat
    ack: Ack
    refusal: Refusal
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("rank", "incarnation", "pid", "node", "digest")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    pid: int
    node: str
    digest: int
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., digest: _Optional[int] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("incarnation", "index", "ops", "batch", "digest")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    index: int
    ops: _containers.RepeatedCompositeFieldContainer[Op]
    batch: Batch
    digest: int
    def __init__(self, incarnation: _Optional[int] = ..., index: _Optional[int] = ..., ops: _Optional[_Iterable[_Union[Op, _Mapping]]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., digest: _Optional[int] = ...) -> None: ...

class Op(_message.Message):
    __slots__ = ("open", "resume", "extend", "commit", "finish", "free_tail", "release", "fork", "flush", "measure", "audit", "extend_imported", "cut_tails")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    FREE_TAIL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    EXTEND_IMPORTED_FIELD_NUMBER: _ClassVar[int]
    CUT_TAILS_FIELD_NUMBER: _ClassVar[int]
    open: OpenOp
    resume: ResumeOp
    extend: ExtendOp
    commit: CommitOp
    finish: FinishOp
    free_tail: FreeTailOp
    release: ReleaseOp
    fork: ForkOp
    flush: FlushOp
    measure: MeasureOp
    audit: AuditOp
    extend_imported: ExtendImportedOp
    cut_tails: CutTailsOp
    def __init__(self, open: _Optional[_Union[OpenOp, _Mapping]] = ..., resume: _Optional[_Union[ResumeOp, _Mapping]] = ..., extend: _Optional[_Union[ExtendOp, _Mapping]] = ..., commit: _Optional[_Union[CommitOp, _Mapping]] = ..., finish: _Optional[_Union[FinishOp, _Mapping]] = ..., free_tail: _Optional[_Union[FreeTailOp, _Mapping]] = ..., release: _Optional[_Union[ReleaseOp, _Mapping]] = ..., fork: _Optional[_Union[ForkOp, _Mapping]] = ..., flush: _Optional[_Union[FlushOp, _Mapping]] = ..., measure: _Optional[_Union[MeasureOp, _Mapping]] = ..., audit: _Optional[_Union[AuditOp, _Mapping]] = ..., extend_imported: _Optional[_Union[ExtendImportedOp, _Mapping]] = ..., cut_tails: _Optional[_Union[CutTailsOp, _Mapping]] = ...) -> None: ...

class OpenOp(_message.Message):
    __slots__ = ("session_id", "tenant", "ephemeral", "scope")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EPHEMERAL_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tenant: str
    ephemeral: bool
    scope: _worker_pb2.KVScope
    def __init__(self, session_id: _Optional[str] = ..., tenant: _Optional[str] = ..., ephemeral: bool = ..., scope: _Optional[_Union[_worker_pb2.KVScope, _Mapping]] = ...) -> None: ...

class ResumeOp(_message.Message):
    __slots__ = ("session_id", "turn_id", "tokens", "keep_len", "match_prefix")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEEP_LEN_FIELD_NUMBER: _ClassVar[int]
    MATCH_PREFIX_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    turn_id: str
    tokens: bytes
    keep_len: int
    match_prefix: bool
    def __init__(self, session_id: _Optional[str] = ..., turn_id: _Optional[str] = ..., tokens: _Optional[bytes] = ..., keep_len: _Optional[int] = ..., match_prefix: bool = ...) -> None: ...

class ExtendOp(_message.Message):
    __slots__ = ("rows", "num_tokens", "reserve")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    num_tokens: int
    reserve: bool
    def __init__(self, rows: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., reserve: bool = ...) -> None: ...

class ExtendImportedOp(_message.Message):
    __slots__ = ("session_id", "num_tokens", "turn_starts", "columns")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TURN_STARTS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    num_tokens: int
    turn_starts: bytes
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., turn_starts: _Optional[bytes] = ..., columns: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CommitOp(_message.Message):
    __slots__ = ("rows", "counts", "tokens")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    counts: bytes
    tokens: bytes
    def __init__(self, rows: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class CutTailsOp(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    def __init__(self, rows: _Optional[bytes] = ...) -> None: ...

class FinishOp(_message.Message):
    __slots__ = ("session_id", "turn_id", "outcome", "known")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    turn_id: str
    outcome: str
    known: bytes
    def __init__(self, session_id: _Optional[str] = ..., turn_id: _Optional[str] = ..., outcome: _Optional[str] = ..., known: _Optional[bytes] = ...) -> None: ...

class FreeTailOp(_message.Message):
    __slots__ = ("session_id", "keep_len")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_LEN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    keep_len: int
    def __init__(self, session_id: _Optional[str] = ..., keep_len: _Optional[int] = ...) -> None: ...

class ReleaseOp(_message.Message):
    __slots__ = ("session_id", "moved")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    moved: bool
    def __init__(self, session_id: _Optional[str] = ..., moved: bool = ...) -> None: ...

class ForkOp(_message.Message):
    __slots__ = ("parent_id", "child_id", "at_len", "for_reading")
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    CHILD_ID_FIELD_NUMBER: _ClassVar[int]
    AT_LEN_FIELD_NUMBER: _ClassVar[int]
    FOR_READING_FIELD_NUMBER: _ClassVar[int]
    parent_id: str
    child_id: str
    at_len: int
    for_reading: bool
    def __init__(self, parent_id: _Optional[str] = ..., child_id: _Optional[str] = ..., at_len: _Optional[int] = ..., for_reading: bool = ...) -> None: ...

class FlushOp(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class MeasureOp(_message.Message):
    __slots__ = ("end",)
    END_FIELD_NUMBER: _ClassVar[int]
    end: bool
    def __init__(self, end: bool = ...) -> None: ...

class AuditOp(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Batch(_message.Message):
    __slots__ = ("rows", "starts", "counts", "tokens", "logit_rows")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    starts: bytes
    counts: bytes
    tokens: bytes
    logit_rows: bytes
    def __init__(self, rows: _Optional[bytes] = ..., starts: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., logit_rows: _Optional[bytes] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("index", "digest", "pages_freed", "audit")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREED_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    index: int
    digest: int
    pages_freed: _containers.RepeatedCompositeFieldContainer[PagesFreed]
    audit: _worker_pb2.AuditReport
    def __init__(self, index: _Optional[int] = ..., digest: _Optional[int] = ..., pages_freed: _Optional[_Iterable[_Union[PagesFreed, _Mapping]]] = ..., audit: _Optional[_Union[_worker_pb2.AuditReport, _Mapping]] = ...) -> None: ...

class PagesFreed(_message.Message):
    __slots__ = ("by_group",)
    BY_GROUP_FIELD_NUMBER: _ClassVar[int]
    by_group: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, by_group: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("session_id", "transfer_id", "address", "columns", "timeout_s", "keys", "kv_nodes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KV_NODES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    transfer_id: str
    address: str
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    timeout_s: float
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    kv_nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., transfer_id: _Optional[str] = ..., address: _Optional[str] = ..., columns: _Optional[_Iterable[bytes]] = ..., timeout_s: _Optional[float] = ..., keys: _Optional[_Iterable[bytes]] = ..., kv_nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("index", "message")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    index: int
    message: str
    def __init__(self, index: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
