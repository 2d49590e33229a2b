from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_NONE: _ClassVar[Tier]
    TIER_MEMORY: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_PEER: _ClassVar[Tier]
TIER_NONE: Tier
TIER_MEMORY: Tier
TIER_DISK: Tier
TIER_PEER: Tier

class StoreRequest(_message.Message):
    __slots__ = ("open", "reserve", "complete", "pin", "unpin", "release", "stats", "owners", "find", "all")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    FIND_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    open: OpenArena
    reserve: ReserveCopies
    complete: CompleteCopies
    pin: PinCopies
    unpin: UnpinCopies
    release: ReleaseCopies
    stats: StoreStatsRequest
    owners: OwnersRequest
    find: WantedCopies
    all: StoreRequests
    def __init__(self, open: _Optional[_Union[OpenArena, _Mapping]] = ..., reserve: _Optional[_Union[ReserveCopies, _Mapping]] = ..., complete: _Optional[_Union[CompleteCopies, _Mapping]] = ..., pin: _Optional[_Union[PinCopies, _Mapping]] = ..., unpin: _Optional[_Union[UnpinCopies, _Mapping]] = ..., release: _Optional[_Union[ReleaseCopies, _Mapping]] = ..., stats: _Optional[_Union[StoreStatsRequest, _Mapping]] = ..., owners: _Optional[_Union[OwnersRequest, _Mapping]] = ..., find: _Optional[_Union[WantedCopies, _Mapping]] = ..., all: _Optional[_Union[StoreRequests, _Mapping]] = ...) -> None: ...

class StoreRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[StoreRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[StoreRequest, _Mapping]]] = ...) -> None: ...

class StoreResponses(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[StoreResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[StoreResponse, _Mapping]]] = ...) -> None: ...

class StoreResponse(_message.Message):
    __slots__ = ("arena", "reserved", "completed", "pinned", "unpinned", "released", "stats", "owners", "found", "all")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    arena: Arena
    reserved: Reserved
    completed: Completed
    pinned: Pinned
    unpinned: Unpinned
    released: Released
    stats: StoreStats
    owners: Owners
    found: FoundCopies
    all: StoreResponses
    def __init__(self, arena: _Optional[_Union[Arena, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., completed: _Optional[_Union[Completed, _Mapping]] = ..., pinned: _Optional[_Union[Pinned, _Mapping]] = ..., unpinned: _Optional[_Union[Unpinned, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., stats: _Optional[_Union[StoreStats, _Mapping]] = ..., owners: _Optional[_Union[Owners, _Mapping]] = ..., found: _Optional[_Union[FoundCopies, _Mapping]] = ..., all: _Optional[_Union[StoreResponses, _Mapping]] = ...) -> None: ...

class OpenArena(_message.Message):
    __slots__ = ("space",)
    SPACE_FIELD_NUMBER: _ClassVar[int]
    space: str
    def __init__(self, space: _Optional[str] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("path", "size")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    path: str
    size: int
    def __init__(self, path: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class ReserveCopies(_message.Message):
    __slots__ = ("group", "keys", "page_bytes", "session_ids")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    group: int
    keys: bytes
    page_bytes: int
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[int] = ..., keys: _Optional[bytes] = ..., page_bytes: _Optional[int] = ..., session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("offsets",)
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class CompleteCopies(_message.Message):
    __slots__ = ("group", "keys", "crcs", "written")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    CRCS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    group: int
    keys: bytes
    crcs: _containers.RepeatedScalarFieldContainer[int]
    written: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, group: _Optional[int] = ..., keys: _Optional[bytes] = ..., crcs: _Optional[_Iterable[int]] = ..., written: _Optional[_Iterable[bool]] = ...) -> None: ...

class Completed(_message.Message):
    __slots__ = ("copies",)
    COPIES_FIELD_NUMBER: _ClassVar[int]
    copies: int
    def __init__(self, copies: _Optional[int] = ...) -> None: ...

class PinCopies(_message.Message):
    __slots__ = ("groups", "session_id")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[KeysOfGroup]
    session_id: str
    def __init__(self, groups: _Optional[_Iterable[_Union[KeysOfGroup, _Mapping]]] = ..., session_id: _Optional[str] = ...) -> None: ...

class KeysOfGroup(_message.Message):
    __slots__ = ("group", "keys")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    group: int
    keys: bytes
    def __init__(self, group: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class Pinned(_message.Message):
    __slots__ = ("pin", "groups")
    PIN_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    pin: int
    groups: _containers.RepeatedCompositeFieldContainer[PlacesOfGroup]
    def __init__(self, pin: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[PlacesOfGroup, _Mapping]]] = ...) -> None: ...

class PlacesOfGroup(_message.Message):
    __slots__ = ("offsets", "crcs")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    CRCS_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    crcs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offsets: _Optional[_Iterable[int]] = ..., crcs: _Optional[_Iterable[int]] = ...) -> None: ...

class UnpinCopies(_message.Message):
    __slots__ = ("pin", "damaged")
    PIN_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    pin: int
    damaged: _containers.RepeatedCompositeFieldContainer[KeysOfGroup]
    def __init__(self, pin: _Optional[int] = ..., damaged: _Optional[_Iterable[_Union[KeysOfGroup, _Mapping]]] = ...) -> None: ...

class Unpinned(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseCopies(_message.Message):
    __slots__ = ("session_id", "tenant")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tenant: str
    def __init__(self, session_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("copies",)
    COPIES_FIELD_NUMBER: _ClassVar[int]
    copies: int
    def __init__(self, copies: _Optional[int] = ...) -> None: ...

class OwnersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Owners(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class WantedCopies(_message.Message):
    __slots__ = ("space", "groups", "session_id", "nodes")
    SPACE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    space: str
    groups: _containers.RepeatedCompositeFieldContainer[KeysOfGroup]
    session_id: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, space: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[KeysOfGroup, _Mapping]]] = ..., session_id: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class FoundCopies(_message.Message):
    __slots__ = ("tiers", "ask_others")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ASK_OTHERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[bytes]
    ask_others: bool
    def __init__(self, tiers: _Optional[_Iterable[bytes]] = ..., ask_others: bool = ...) -> None: ...

class BroughtCopies(_message.Message):
    __slots__ = ("copies",)
    COPIES_FIELD_NUMBER: _ClassVar[int]
    copies: int
    def __init__(self, copies: _Optional[int] = ...) -> None: ...

class KeysOfPrefix(_message.Message):
    __slots__ = ("prefix", "keys")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    prefix: bytes
    keys: bytes
    def __init__(self, prefix: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class PeerKeys(_message.Message):
    __slots__ = ("parts", "session_id")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[KeysOfPrefix]
    session_id: str
    def __init__(self, parts: _Optional[_Iterable[_Union[KeysOfPrefix, _Mapping]]] = ..., session_id: _Optional[str] = ...) -> None: ...

class PeerCopies(_message.Message):
    __slots__ = ("keys", "session_ids", "crcs", "data")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    CRCS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    keys: KeysOfPrefix
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    crcs: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, keys: _Optional[_Union[KeysOfPrefix, _Mapping]] = ..., session_ids: _Optional[_Iterable[str]] = ..., crcs: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutCopies(_message.Message):
    __slots__ = ("copies",)
    COPIES_FIELD_NUMBER: _ClassVar[int]
    copies: int
    def __init__(self, copies: _Optional[int] = ...) -> None: ...

class StoreStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreStats(_message.Message):
    __slots__ = ("bytes_total", "bytes_used", "copies", "counters", "disk_bytes_used", "node", "replicas")
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
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    bytes_total: int
    bytes_used: int
    copies: int
    counters: _containers.ScalarMap[str, int]
    disk_bytes_used: int
    node: str
    replicas: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, bytes_total: _Optional[int] = ..., bytes_used: _Optional[int] = ..., copies: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., disk_bytes_used: _Optional[int] = ..., node: _Optional[str] = ..., replicas: _Optional[_Iterable[str]] = ...) -> None: ...
