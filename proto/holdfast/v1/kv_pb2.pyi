from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ReadRequest(_message.Message):
    __slots__ = ("transfer_id", "columns")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, transfer_id: _Optional[str] = ..., columns: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Pages(_message.Message):
    __slots__ = ("group", "columns", "data", "crcs")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRCS_FIELD_NUMBER: _ClassVar[int]
    group: int
    columns: bytes
    data: bytes
    crcs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., columns: _Optional[bytes] = ..., data: _Optional[bytes] = ..., crcs: _Optional[_Iterable[int]] = ...) -> None: ...
