from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ReadRequest(_message.Message):
    __slots__ = ("transfer_id", "first_page", "end_page")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    END_PAGE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    first_page: int
    end_page: int
    def __init__(self, transfer_id: _Optional[str] = ..., first_page: _Optional[int] = ..., end_page: _Optional[int] = ...) -> None: ...

class Pages(_message.Message):
    __slots__ = ("first_page", "data", "crcs")
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRCS_FIELD_NUMBER: _ClassVar[int]
    first_page: int
    data: bytes
    crcs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_page: _Optional[int] = ..., data: _Optional[bytes] = ..., crcs: _Optional[_Iterable[int]] = ...) -> None: ...
