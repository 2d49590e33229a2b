from holdfast.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_IN_PLACE: _ClassVar[PauseMode]
    PAUSE_MODE_RETRACT: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
PAUSE_MODE_IN_PLACE: PauseMode
PAUSE_MODE_RETRACT: PauseMode
PAUSE_MODE_ABORT: PauseMode

class RouterMessage(_message.Message):
    __slots__ = ("submit", "abort")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: Abort
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("turn_id", "session_id", "tenant", "epoch", "tokens", "prefix_len", "prefix_crc", "prompt_len", "sampling", "ephemeral", "kv_nodes", "scope")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CRC_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EPHEMERAL_FIELD_NUMBER: _ClassVar[int]
    KV_NODES_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    turn_id: str
    session_id: str
    tenant: str
    epoch: int
    tokens: bytes
    prefix_len: int
    prefix_crc: int
    prompt_len: int
    sampling: _session_pb2.Sampling
    ephemeral: bool
    kv_nodes: _containers.RepeatedScalarFieldContainer[str]
    scope: KVScope
    def __init__(self, turn_id: _Optional[str] = ..., session_id: _Optional[str] = ..., tenant: _Optional[str] = ..., epoch: _Optional[int] = ..., tokens: _Optional[bytes] = ..., prefix_len: _Optional[int] = ..., prefix_crc: _Optional[int] = ..., prompt_len: _Optional[int] = ..., sampling: _Optional[_Union[_session_pb2.Sampling, _Mapping]] = ..., ephemeral: bool = ..., kv_nodes: _Optional[_Iterable[str]] = ..., scope: _Optional[_Union[KVScope, _Mapping]] = ...) -> None: ...

class KVScope(_message.Message):
    __slots__ = ("name", "share_ppm")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARE_PPM_FIELD_NUMBER: _ClassVar[int]
    name: str
    share_ppm: int
    def __init__(self, name: _Optional[str] = ..., share_ppm: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("turn_id",)
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    turn_id: str
    def __init__(self, turn_id: _Optional[str] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("welcome", "step", "beat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    step: StepUpdates
    beat: WorkerStats
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[StepUpdates, _Mapping]] = ..., beat: _Optional[_Union[WorkerStats, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "incarnation", "context_len", "page_size", "vocab_size", "lifelines")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    LIFELINES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    context_len: int
    page_size: int
    vocab_size: int
    lifelines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., context_len: _Optional[int] = ..., page_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., lifelines: _Optional[_Iterable[str]] = ...) -> None: ...

class StepUpdates(_message.Message):
    __slots__ = ("updates",)
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[TurnUpdate]
    def __init__(self, updates: _Optional[_Iterable[_Union[TurnUpdate, _Mapping]]] = ...) -> None: ...

class TurnUpdate(_message.Message):
    __slots__ = ("turn_id", "tokens", "logprobs", "input_logprobs", "cached_len", "finish_reason", "matched_token", "matched_text", "needs_history", "error_code", "error_message", "error_param", "speculation")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TEXT_FIELD_NUMBER: _ClassVar[int]
    NEEDS_HISTORY_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_PARAM_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    turn_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_session_pb2.TokenLogprob]
    input_logprobs: _containers.RepeatedCompositeFieldContainer[_session_pb2.TokenLogprob]
    cached_len: int
    finish_reason: str
    matched_token: int
    matched_text: str
    needs_history: bool
    error_code: str
    error_message: str
    error_param: str
    speculation: _session_pb2.Speculation
    def __init__(self, turn_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_session_pb2.TokenLogprob, _Mapping]]] = ..., input_logprobs: _Optional[_Iterable[_Union[_session_pb2.TokenLogprob, _Mapping]]] = ..., cached_len: _Optional[int] = ..., finish_reason: _Optional[str] = ..., matched_token: _Optional[int] = ..., matched_text: _Optional[str] = ..., needs_history: bool = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., error_param: _Optional[str] = ..., speculation: _Optional[_Union[_session_pb2.Speculation, _Mapping]] = ...) -> None: ...

class WorkerReleaseRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "mode", "request_id", "moved")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    mode: _session_pb2.ReleaseMode
    request_id: str
    moved: bool
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., mode: _Optional[_Union[_session_pb2.ReleaseMode, str]] = ..., request_id: _Optional[str] = ..., moved: bool = ...) -> None: ...

class WorkerFreeTailRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "keep_len", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEEP_LEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    keep_len: int
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., keep_len: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ControlResponse(_message.Message):
    __slots__ = ("log_index", "ranks")
    LOG_INDEX_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    log_index: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankAnswer]
    def __init__(self, log_index: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankAnswer, _Mapping]]] = ...) -> None: ...

class RankAnswer(_message.Message):
    __slots__ = ("rank", "log_index", "pages_freed", "digest", "pages_freed_by_group")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOG_INDEX_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREED_BY_GROUP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    log_index: int
    pages_freed: int
    digest: int
    pages_freed_by_group: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rank: _Optional[int] = ..., log_index: _Optional[int] = ..., pages_freed: _Optional[int] = ..., digest: _Optional[int] = ..., pages_freed_by_group: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerForkRequest(_message.Message):
    __slots__ = ("session_id", "child_id", "epoch", "at_len")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CHILD_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AT_LEN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    child_id: str
    epoch: int
    at_len: int
    def __init__(self, session_id: _Optional[str] = ..., child_id: _Optional[str] = ..., epoch: _Optional[int] = ..., at_len: _Optional[int] = ...) -> None: ...

class WorkerForkResponse(_message.Message):
    __slots__ = ("shared_len",)
    SHARED_LEN_FIELD_NUMBER: _ClassVar[int]
    shared_len: int
    def __init__(self, shared_len: _Optional[int] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "ok", "log_index", "ranks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    LOG_INDEX_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    ok: bool
    log_index: int
    ranks: _containers.RepeatedCompositeFieldContainer[AuditReport]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., ok: bool = ..., log_index: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[AuditReport, _Mapping]]] = ...) -> None: ...

class AuditReport(_message.Message):
    __slots__ = ("rank", "digest", "ok", "num_slots", "num_running", "faults", "groups")
    RANK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    digest: int
    ok: bool
    num_slots: int
    num_running: int
    faults: _containers.RepeatedScalarFieldContainer[str]
    groups: _containers.RepeatedCompositeFieldContainer[GroupPages]
    def __init__(self, rank: _Optional[int] = ..., digest: _Optional[int] = ..., ok: bool = ..., num_slots: _Optional[int] = ..., num_running: _Optional[int] = ..., faults: _Optional[_Iterable[str]] = ..., groups: _Optional[_Iterable[_Union[GroupPages, _Mapping]]] = ...) -> None: ...

class GroupPages(_message.Message):
    __slots__ = ("group", "total", "free", "cached", "held", "leaked", "overheld")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LEAKED_FIELD_NUMBER: _ClassVar[int]
    OVERHELD_FIELD_NUMBER: _ClassVar[int]
    group: str
    total: int
    free: int
    cached: int
    held: int
    leaked: _containers.RepeatedScalarFieldContainer[int]
    overheld: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[str] = ..., total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., held: _Optional[int] = ..., leaked: _Optional[_Iterable[int]] = ..., overheld: _Optional[_Iterable[int]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("worker_id", "incarnation", "pid", "groups", "sessions", "running", "waiting", "retracted", "counters", "draining", "ranks", "metrics_url", "paused", "kv_store")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    METRICS_URL_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    KV_STORE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    pid: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupPages]
    sessions: int
    running: int
    waiting: int
    retracted: int
    counters: _containers.ScalarMap[str, int]
    draining: bool
    ranks: _containers.RepeatedCompositeFieldContainer[RankStats]
    metrics_url: str
    paused: bool
    kv_store: KVStoreStats
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupPages, _Mapping]]] = ..., sessions: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., retracted: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., draining: bool = ..., ranks: _Optional[_Iterable[_Union[RankStats, _Mapping]]] = ..., metrics_url: _Optional[str] = ..., paused: bool = ..., kv_store: _Optional[_Union[KVStoreStats, _Mapping]] = ...) -> None: ...

class KVStoreStats(_message.Message):
    __slots__ = ("bytes_total", "bytes_used", "copies", "waiting", "replicas", "disk_bytes_used", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    bytes_total: int
    bytes_used: int
    copies: int
    waiting: int
    replicas: _containers.RepeatedScalarFieldContainer[str]
    disk_bytes_used: int
    counters: _containers.ScalarMap[str, int]
    def __init__(self, bytes_total: _Optional[int] = ..., bytes_used: _Optional[int] = ..., copies: _Optional[int] = ..., waiting: _Optional[int] = ..., replicas: _Optional[_Iterable[str]] = ..., disk_bytes_used: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RankStats(_message.Message):
    __slots__ = ("rank", "pid", "node", "log_index", "lag")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    LOG_INDEX_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    node: str
    log_index: int
    lag: int
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., log_index: _Optional[int] = ..., lag: _Optional[int] = ...) -> None: ...

class SlotsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SlotsResponse(_message.Message):
    __slots__ = ("session_ids", "copied_session_ids", "copies_unknown")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    COPIED_SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    COPIES_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    copied_session_ids: _containers.RepeatedScalarFieldContainer[str]
    copies_unknown: bool
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ..., copied_session_ids: _Optional[_Iterable[str]] = ..., copies_unknown: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("turns_preempted",)
    TURNS_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    turns_preempted: int
    def __init__(self, turns_preempted: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("paused", "mode")
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    paused: bool
    mode: PauseMode
    def __init__(self, paused: bool = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ImportRequest(_message.Message):
    __slots__ = ("session_id", "epoch", "source_address", "timeout_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    source_address: str
    timeout_s: float
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., source_address: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ImportResponse(_message.Message):
    __slots__ = ("committed_len", "pages", "bytes", "seconds")
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    committed_len: int
    pages: int
    bytes: int
    seconds: float
    def __init__(self, committed_len: _Optional[int] = ..., pages: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ExportRequest(_message.Message):
    __slots__ = ("session_id", "transfer_id", "timeout_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    transfer_id: str
    timeout_s: float
    def __init__(self, session_id: _Optional[str] = ..., transfer_id: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ExportResponse(_message.Message):
    __slots__ = ("tenant", "tokens", "committed_len", "layout", "addresses", "columns", "turn_starts", "scope")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TURN_STARTS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    tokens: bytes
    committed_len: int
    layout: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    turn_starts: bytes
    scope: KVScope
    def __init__(self, tenant: _Optional[str] = ..., tokens: _Optional[bytes] = ..., committed_len: _Optional[int] = ..., layout: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., columns: _Optional[_Iterable[bytes]] = ..., turn_starts: _Optional[bytes] = ..., scope: _Optional[_Union[KVScope, _Mapping]] = ...) -> None: ...
