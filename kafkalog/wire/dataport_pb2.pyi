from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestHeader(_message.Message):
    __slots__ = ("correlation_id", "append", "fetch", "stage", "replica_fetch")
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FETCH_FIELD_NUMBER: _ClassVar[int]
    correlation_id: int
    append: AppendRequest
    fetch: FetchRequest
    stage: StageRequest
    replica_fetch: ReplicaFetchRequest
    def __init__(self, correlation_id: _Optional[int] = ..., append: _Optional[_Union[AppendRequest, _Mapping]] = ..., fetch: _Optional[_Union[FetchRequest, _Mapping]] = ..., stage: _Optional[_Union[StageRequest, _Mapping]] = ..., replica_fetch: _Optional[_Union[ReplicaFetchRequest, _Mapping]] = ...) -> None: ...

class ReplyHeader(_message.Message):
    __slots__ = ("correlation_id", "append", "fetch", "stage", "replica_fetch", "error")
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FETCH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    correlation_id: int
    append: AppendReply
    fetch: FetchReply
    stage: StageReply
    replica_fetch: ReplicaFetchReply
    error: Error
    def __init__(self, correlation_id: _Optional[int] = ..., append: _Optional[_Union[AppendReply, _Mapping]] = ..., fetch: _Optional[_Union[FetchReply, _Mapping]] = ..., stage: _Optional[_Union[StageReply, _Mapping]] = ..., replica_fetch: _Optional[_Union[ReplicaFetchReply, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "facts")
    CODE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    code: int
    facts: str
    def __init__(self, code: _Optional[int] = ..., facts: _Optional[str] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("acks", "timeout_ms", "partitions")
    ACKS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    acks: int
    timeout_ms: int
    partitions: _containers.RepeatedCompositeFieldContainer[AppendPartition]
    def __init__(self, acks: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[AppendPartition, _Mapping]]] = ...) -> None: ...

class AppendPartition(_message.Message):
    __slots__ = ("topic_id", "partition", "length")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    length: int
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class AppendReply(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[AppendedPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[AppendedPartition, _Mapping]]] = ...) -> None: ...

class AppendedPartition(_message.Message):
    __slots__ = ("error", "base_offset", "append_timestamp_us", "log_start_offset")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BASE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    APPEND_TIMESTAMP_US_FIELD_NUMBER: _ClassVar[int]
    LOG_START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    error: Error
    base_offset: int
    append_timestamp_us: int
    log_start_offset: int
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., base_offset: _Optional[int] = ..., append_timestamp_us: _Optional[int] = ..., log_start_offset: _Optional[int] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("timeout_ms", "partitions")
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    partitions: _containers.RepeatedCompositeFieldContainer[StagePartition]
    def __init__(self, timeout_ms: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[StagePartition, _Mapping]]] = ...) -> None: ...

class StagePartition(_message.Message):
    __slots__ = ("topic_id", "partition", "uuid", "length")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    uuid: bytes
    length: int
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ..., uuid: _Optional[bytes] = ..., length: _Optional[int] = ...) -> None: ...

class StageReply(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[StagedPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[StagedPartition, _Mapping]]] = ...) -> None: ...

class StagedPartition(_message.Message):
    __slots__ = ("error", "batches", "length")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    error: Error
    batches: int
    length: int
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., batches: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("max_wait_ms", "min_bytes", "max_bytes", "partitions", "for_repair")
    MAX_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    MIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    FOR_REPAIR_FIELD_NUMBER: _ClassVar[int]
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    partitions: _containers.RepeatedCompositeFieldContainer[FetchPartition]
    for_repair: bool
    def __init__(self, max_wait_ms: _Optional[int] = ..., min_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[FetchPartition, _Mapping]]] = ..., for_repair: _Optional[bool] = ...) -> None: ...

class FetchPartition(_message.Message):
    __slots__ = ("topic_id", "partition", "offset", "max_bytes", "hint", "leader_epoch", "last_epoch")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    offset: int
    max_bytes: int
    hint: PositionHint
    leader_epoch: int
    last_epoch: int
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., max_bytes: _Optional[int] = ..., hint: _Optional[_Union[PositionHint, _Mapping]] = ..., leader_epoch: _Optional[int] = ..., last_epoch: _Optional[int] = ...) -> None: ...

class PositionHint(_message.Message):
    __slots__ = ("segment_base_offset", "position")
    SEGMENT_BASE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    segment_base_offset: int
    position: int
    def __init__(self, segment_base_offset: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[FetchedPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[FetchedPartition, _Mapping]]] = ...) -> None: ...

class FetchedPartition(_message.Message):
    __slots__ = ("error", "length", "log_start_offset", "end_offset", "slice")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOG_START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    error: Error
    length: int
    log_start_offset: int
    end_offset: int
    slice: PositionHint
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., length: _Optional[int] = ..., log_start_offset: _Optional[int] = ..., end_offset: _Optional[int] = ..., slice: _Optional[_Union[PositionHint, _Mapping]] = ...) -> None: ...

class ReplicaFetchRequest(_message.Message):
    __slots__ = ("broker_id", "registration", "directory", "max_wait_ms", "max_bytes", "partitions")
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    broker_id: int
    registration: int
    directory: str
    max_wait_ms: int
    max_bytes: int
    partitions: _containers.RepeatedCompositeFieldContainer[ReplicaPosition]
    def __init__(self, broker_id: _Optional[int] = ..., registration: _Optional[int] = ..., directory: _Optional[str] = ..., max_wait_ms: _Optional[int] = ..., max_bytes: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[ReplicaPosition, _Mapping]]] = ...) -> None: ...

class ReplicaPosition(_message.Message):
    __slots__ = ("topic_id", "partition", "leaves", "leader_epoch", "end_offset", "last_epoch", "hint", "staged", "is_damaged", "has_damage", "needs_producers")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    IS_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    HAS_DAMAGE_FIELD_NUMBER: _ClassVar[int]
    NEEDS_PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    leaves: bool
    leader_epoch: int
    end_offset: int
    last_epoch: int
    hint: PositionHint
    staged: _containers.RepeatedCompositeFieldContainer[StagedFile]
    is_damaged: bool
    has_damage: bool
    needs_producers: bool
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ..., leaves: _Optional[bool] = ..., leader_epoch: _Optional[int] = ..., end_offset: _Optional[int] = ..., last_epoch: _Optional[int] = ..., hint: _Optional[_Union[PositionHint, _Mapping]] = ..., staged: _Optional[_Iterable[_Union[StagedFile, _Mapping]]] = ..., is_damaged: _Optional[bool] = ..., has_damage: _Optional[bool] = ..., needs_producers: _Optional[bool] = ...) -> None: ...

class StagedFile(_message.Message):
    __slots__ = ("number", "salt", "size", "part")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    number: int
    salt: int
    size: int
    part: bytes
    def __init__(self, number: _Optional[int] = ..., salt: _Optional[int] = ..., size: _Optional[int] = ..., part: _Optional[bytes] = ...) -> None: ...

class ReplicaFetchReply(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[ReplicaNews]
    def __init__(self, partitions: _Optional[_Iterable[_Union[ReplicaNews, _Mapping]]] = ...) -> None: ...

class ReplicaNews(_message.Message):
    __slots__ = ("topic_id", "partition", "error", "leader_epoch", "diverges", "agreed_epoch", "agreed_end_offset", "length", "high_watermark", "log_start_offset", "slice", "pieces", "names_staged", "staged", "is_throttled", "producers_length", "copy_offset")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIVERGES_FIELD_NUMBER: _ClassVar[int]
    AGREED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    AGREED_END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    HIGH_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    LOG_START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    NAMES_STAGED_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    IS_THROTTLED_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_LENGTH_FIELD_NUMBER: _ClassVar[int]
    COPY_OFFSET_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    error: Error
    leader_epoch: int
    diverges: bool
    agreed_epoch: int
    agreed_end_offset: int
    length: int
    high_watermark: int
    log_start_offset: int
    slice: PositionHint
    pieces: _containers.RepeatedCompositeFieldContainer[StagedPiece]
    names_staged: bool
    staged: _containers.RepeatedCompositeFieldContainer[StagedFile]
    is_throttled: bool
    producers_length: int
    copy_offset: int
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., leader_epoch: _Optional[int] = ..., diverges: _Optional[bool] = ..., agreed_epoch: _Optional[int] = ..., agreed_end_offset: _Optional[int] = ..., length: _Optional[int] = ..., high_watermark: _Optional[int] = ..., log_start_offset: _Optional[int] = ..., slice: _Optional[_Union[PositionHint, _Mapping]] = ..., pieces: _Optional[_Iterable[_Union[StagedPiece, _Mapping]]] = ..., names_staged: _Optional[bool] = ..., staged: _Optional[_Iterable[_Union[StagedFile, _Mapping]]] = ..., is_throttled: _Optional[bool] = ..., producers_length: _Optional[int] = ..., copy_offset: _Optional[int] = ...) -> None: ...

class StagedPiece(_message.Message):
    __slots__ = ("number", "position", "length", "part", "salt")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    number: int
    position: int
    length: int
    part: bytes
    salt: int
    def __init__(self, number: _Optional[int] = ..., position: _Optional[int] = ..., length: _Optional[int] = ..., part: _Optional[bytes] = ..., salt: _Optional[int] = ...) -> None: ...
