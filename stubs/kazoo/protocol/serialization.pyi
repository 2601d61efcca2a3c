from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from kazoo.protocol.states import WatchedEvent, ZnodeStat
from kazoo.security import ACL

_Watcher: TypeAlias = Callable[[WatchedEvent], None] | None

class CheckVersion(NamedTuple):
    path: str
    version: int
    def serialize(self) -> bytearray: ...

class Create(NamedTuple):
    path: str
    data: bytes
    acl: Sequence[ACL]
    flags: int
    def serialize(self) -> bytearray: ...
    @classmethod
    def deserialize(cls, bytes: bytes, offset: int) -> str: ...

class Delete(NamedTuple):
    path: str
    version: int
    def serialize(self) -> bytearray: ...
    @classmethod
    def deserialize(cls, bytes: bytes, offset: int) -> bool: ...

class Exists(NamedTuple):
    path: str
    watcher: _Watcher
    def serialize(self) -> bytearray: ...
    @classmethod
    def deserialize(cls, bytes: bytes, offset: int) -> ZnodeStat | None: ...

class GetChildren(NamedTuple):
    path: str
    watcher: _Watcher
    def serialize(self) -> bytearray: ...
    @classmethod
    def deserialize(cls, bytes: bytes, offset: int) -> list[str]: ...

class GetData(NamedTuple):
    path: str
    watcher: _Watcher
    def serialize(self) -> bytearray: ...
    @classmethod
    def deserialize(cls, bytes: bytes, offset: int) -> tuple[bytes, ZnodeStat]: ...

class SetData(NamedTuple):
    path: str
    data: bytes
    version: int
    def serialize(self) -> bytearray: ...
    @classmethod
    def deserialize(cls, bytes: bytes, offset: int) -> ZnodeStat: ...

class Transaction(NamedTuple):
    operations: Sequence[Any]
    def serialize(self) -> bytearray: ...
    @classmethod
    def deserialize(cls, bytes: bytes, offset: int) -> list[Any]: ...
