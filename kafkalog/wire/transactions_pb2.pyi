from kafkalog.wire import dataport_pb2 as _dataport_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrepareRequest(_message.Message):
    __slots__ = ("transactional_id", "producer_id", "batch_id", "commit_uuid", "version", "partitions")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_UUID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    producer_id: int
    batch_id: int
    commit_uuid: bytes
    version: int
    partitions: _containers.RepeatedCompositeFieldContainer[PreparePartition]
    def __init__(self, transactional_id: _Optional[str] = ..., producer_id: _Optional[int] = ..., batch_id: _Optional[int] = ..., commit_uuid: _Optional[bytes] = ..., version: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[PreparePartition, _Mapping]]] = ...) -> None: ...

class PreparePartition(_message.Message):
    __slots__ = ("topic_id", "partition", "parts")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    parts: _containers.RepeatedCompositeFieldContainer[StagedPart]
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[StagedPart, _Mapping]]] = ...) -> None: ...

class StagedPart(_message.Message):
    __slots__ = ("uuid", "part", "batches", "length")
    UUID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    uuid: bytes
    part: int
    batches: int
    length: int
    def __init__(self, uuid: _Optional[bytes] = ..., part: _Optional[int] = ..., batches: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class PrepareReply(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[PreparedPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[PreparedPartition, _Mapping]]] = ...) -> None: ...

class PreparedPartition(_message.Message):
    __slots__ = ("error", "unfinished", "progress", "queued")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    error: _dataport_pb2.Error
    unfinished: bool
    progress: int
    queued: bool
    def __init__(self, error: _Optional[_Union[_dataport_pb2.Error, _Mapping]] = ..., unfinished: _Optional[bool] = ..., progress: _Optional[int] = ..., queued: _Optional[bool] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("transactional_id", "producer_id", "batch_id", "commit_uuid", "partitions")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_UUID_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    producer_id: int
    batch_id: int
    commit_uuid: bytes
    partitions: _containers.RepeatedCompositeFieldContainer[TransactionPartition]
    def __init__(self, transactional_id: _Optional[str] = ..., producer_id: _Optional[int] = ..., batch_id: _Optional[int] = ..., commit_uuid: _Optional[bytes] = ..., partitions: _Optional[_Iterable[_Union[TransactionPartition, _Mapping]]] = ...) -> None: ...

class TransactionPartition(_message.Message):
    __slots__ = ("topic_id", "partition")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ...) -> None: ...

class ApplyReply(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[AppliedPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[AppliedPartition, _Mapping]]] = ...) -> None: ...

class AppliedPartition(_message.Message):
    __slots__ = ("error", "end_offset", "unfinished", "progress", "queued")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    error: _dataport_pb2.Error
    end_offset: int
    unfinished: bool
    progress: int
    queued: bool
    def __init__(self, error: _Optional[_Union[_dataport_pb2.Error, _Mapping]] = ..., end_offset: _Optional[int] = ..., unfinished: _Optional[bool] = ..., progress: _Optional[int] = ..., queued: _Optional[bool] = ...) -> None: ...

class ForgetStagedRequest(_message.Message):
    __slots__ = ("transactional_id", "batch_id", "partitions", "commit_uuid", "below_version", "stays")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_UUID_FIELD_NUMBER: _ClassVar[int]
    BELOW_VERSION_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    batch_id: int
    partitions: _containers.RepeatedCompositeFieldContainer[TransactionPartition]
    commit_uuid: bytes
    below_version: int
    stays: bool
    def __init__(self, transactional_id: _Optional[str] = ..., batch_id: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[TransactionPartition, _Mapping]]] = ..., commit_uuid: _Optional[bytes] = ..., below_version: _Optional[int] = ..., stays: _Optional[bool] = ...) -> None: ...

class ForgetStagedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortStagedRequest(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[AbortStagedPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[AbortStagedPartition, _Mapping]]] = ...) -> None: ...

class AbortStagedPartition(_message.Message):
    __slots__ = ("topic_id", "partition", "uuids")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    UUIDS_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    uuids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ..., uuids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AbortStagedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("batch_id", "family")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    family: int
    def __init__(self, batch_id: _Optional[int] = ..., family: _Optional[int] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("renew_within_ms",)
    RENEW_WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    renew_within_ms: int
    def __init__(self, renew_within_ms: _Optional[int] = ...) -> None: ...

class ListStagedRequest(_message.Message):
    __slots__ = ("transactional_id",)
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    def __init__(self, transactional_id: _Optional[str] = ...) -> None: ...

class ListStagedReply(_message.Message):
    __slots__ = ("sets",)
    SETS_FIELD_NUMBER: _ClassVar[int]
    sets: _containers.RepeatedCompositeFieldContainer[StagedSet]
    def __init__(self, sets: _Optional[_Iterable[_Union[StagedSet, _Mapping]]] = ...) -> None: ...

class StagedSet(_message.Message):
    __slots__ = ("topic_id", "partition", "topic", "transactional_id", "producer_id", "batch_id", "commit_uuid", "version", "parts", "length", "staged_us", "is_copy")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_UUID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    STAGED_US_FIELD_NUMBER: _ClassVar[int]
    IS_COPY_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    topic: str
    transactional_id: str
    producer_id: int
    batch_id: int
    commit_uuid: bytes
    version: int
    parts: int
    length: int
    staged_us: int
    is_copy: bool
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ..., topic: _Optional[str] = ..., transactional_id: _Optional[str] = ..., producer_id: _Optional[int] = ..., batch_id: _Optional[int] = ..., commit_uuid: _Optional[bytes] = ..., version: _Optional[int] = ..., parts: _Optional[int] = ..., length: _Optional[int] = ..., staged_us: _Optional[int] = ..., is_copy: _Optional[bool] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("transactional_id", "version", "batch_id", "commit_uuid", "run_id", "fingerprint", "done", "topics", "replaced_runs", "stays", "decided_us", "query_id", "forgotten", "writers", "applied", "unknown")
    TRANSACTIONAL_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_UUID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    REPLACED_RUNS_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    DECIDED_US_FIELD_NUMBER: _ClassVar[int]
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    transactional_id: str
    version: int
    batch_id: int
    commit_uuid: bytes
    run_id: str
    fingerprint: bytes
    done: bool
    topics: _containers.RepeatedCompositeFieldContainer[DecidedTopic]
    replaced_runs: _containers.RepeatedScalarFieldContainer[str]
    stays: bool
    decided_us: int
    query_id: str
    forgotten: bool
    writers: _containers.RepeatedCompositeFieldContainer[Writer]
    applied: _containers.RepeatedCompositeFieldContainer[DecidedTopic]
    unknown: str
    def __init__(self, transactional_id: _Optional[str] = ..., version: _Optional[int] = ..., batch_id: _Optional[int] = ..., commit_uuid: _Optional[bytes] = ..., run_id: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., done: _Optional[bool] = ..., topics: _Optional[_Iterable[_Union[DecidedTopic, _Mapping]]] = ..., replaced_runs: _Optional[_Iterable[str]] = ..., stays: _Optional[bool] = ..., decided_us: _Optional[int] = ..., query_id: _Optional[str] = ..., forgotten: _Optional[bool] = ..., writers: _Optional[_Iterable[_Union[Writer, _Mapping]]] = ..., applied: _Optional[_Iterable[_Union[DecidedTopic, _Mapping]]] = ..., unknown: _Optional[str] = ...) -> None: ...

class Writer(_message.Message):
    __slots__ = ("commit_uuid", "run_id", "session_id")
    COMMIT_UUID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    commit_uuid: bytes
    run_id: str
    session_id: str
    def __init__(self, commit_uuid: _Optional[bytes] = ..., run_id: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class DecidedTopic(_message.Message):
    __slots__ = ("topic_id", "topic", "partitions")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    topic: str
    partitions: _containers.RepeatedCompositeFieldContainer[DecidedRange]
    def __init__(self, topic_id: _Optional[bytes] = ..., topic: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[DecidedRange, _Mapping]]] = ...) -> None: ...

class DecidedRange(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class ReadDecisionsRequest(_message.Message):
    __slots__ = ("transactional_ids",)
    TRANSACTIONAL_IDS_FIELD_NUMBER: _ClassVar[int]
    transactional_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transactional_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DecideRequest(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    def __init__(self, decision: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...

class DecideReply(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class ListDecisionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Decisions(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ...) -> None: ...
