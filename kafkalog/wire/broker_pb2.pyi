from kafkalog.wire import dataport_pb2 as _dataport_pb2
from kafkalog.wire import transactions_pb2 as _transactions_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterDescription(_message.Message):
    __slots__ = ("cluster_id", "brokers", "zookeeper_connect", "zookeeper_chroot", "answering_broker_id", "protocol", "format_level", "is_uncertain")
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    BROKERS_FIELD_NUMBER: _ClassVar[int]
    ZOOKEEPER_CONNECT_FIELD_NUMBER: _ClassVar[int]
    ZOOKEEPER_CHROOT_FIELD_NUMBER: _ClassVar[int]
    ANSWERING_BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FORMAT_LEVEL_FIELD_NUMBER: _ClassVar[int]
    IS_UNCERTAIN_FIELD_NUMBER: _ClassVar[int]
    cluster_id: str
    brokers: _containers.RepeatedCompositeFieldContainer[BrokerDescription]
    zookeeper_connect: str
    zookeeper_chroot: str
    answering_broker_id: int
    protocol: VersionRange
    format_level: int
    is_uncertain: bool
    def __init__(self, cluster_id: _Optional[str] = ..., brokers: _Optional[_Iterable[_Union[BrokerDescription, _Mapping]]] = ..., zookeeper_connect: _Optional[str] = ..., zookeeper_chroot: _Optional[str] = ..., answering_broker_id: _Optional[int] = ..., protocol: _Optional[_Union[VersionRange, _Mapping]] = ..., format_level: _Optional[int] = ..., is_uncertain: _Optional[bool] = ...) -> None: ...

class VersionRange(_message.Message):
    __slots__ = ("oldest", "newest")
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    oldest: int
    newest: int
    def __init__(self, oldest: _Optional[int] = ..., newest: _Optional[int] = ...) -> None: ...

class DescribeControllerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ControllerDescription(_message.Message):
    __slots__ = ("broker_id", "controller_epoch")
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    broker_id: int
    controller_epoch: int
    def __init__(self, broker_id: _Optional[int] = ..., controller_epoch: _Optional[int] = ...) -> None: ...

class BrokerDescription(_message.Message):
    __slots__ = ("broker_id", "host", "grpc_port", "data_port", "rack", "epoch", "version", "protocol", "formats")
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    GRPC_PORT_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    broker_id: int
    host: str
    grpc_port: int
    data_port: int
    rack: str
    epoch: int
    version: str
    protocol: VersionRange
    formats: VersionRange
    def __init__(self, broker_id: _Optional[int] = ..., host: _Optional[str] = ..., grpc_port: _Optional[int] = ..., data_port: _Optional[int] = ..., rack: _Optional[str] = ..., epoch: _Optional[int] = ..., version: _Optional[str] = ..., protocol: _Optional[_Union[VersionRange, _Mapping]] = ..., formats: _Optional[_Union[VersionRange, _Mapping]] = ...) -> None: ...

class UpgradeClusterRequest(_message.Message):
    __slots__ = ("level", "dry_run")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    level: int
    dry_run: bool
    def __init__(self, level: _Optional[int] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class UpgradeClusterReply(_message.Message):
    __slots__ = ("level_before", "level", "brokers", "absent")
    LEVEL_BEFORE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    BROKERS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    level_before: int
    level: int
    brokers: _containers.RepeatedCompositeFieldContainer[BrokerDescription]
    absent: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, level_before: _Optional[int] = ..., level: _Optional[int] = ..., brokers: _Optional[_Iterable[_Union[BrokerDescription, _Mapping]]] = ..., absent: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeTopicsRequest(_message.Message):
    __slots__ = ("names", "ids", "extents", "moving")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    ids: _containers.RepeatedScalarFieldContainer[bytes]
    extents: bool
    moving: bool
    def __init__(self, names: _Optional[_Iterable[str]] = ..., ids: _Optional[_Iterable[bytes]] = ..., extents: _Optional[bool] = ..., moving: _Optional[bool] = ...) -> None: ...

class TopicDescriptions(_message.Message):
    __slots__ = ("topics", "is_uncertain", "cluster_id")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    IS_UNCERTAIN_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[TopicDescription]
    is_uncertain: bool
    cluster_id: str
    def __init__(self, topics: _Optional[_Iterable[_Union[TopicDescription, _Mapping]]] = ..., is_uncertain: _Optional[bool] = ..., cluster_id: _Optional[str] = ...) -> None: ...

class TopicDescription(_message.Message):
    __slots__ = ("error", "name", "topic_id", "config", "partitions", "effective", "created_us", "version", "behind", "created_zxid")
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class EffectiveEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
    CREATED_US_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    CREATED_ZXID_FIELD_NUMBER: _ClassVar[int]
    error: _dataport_pb2.Error
    name: str
    topic_id: bytes
    config: _containers.ScalarMap[str, str]
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionDescription]
    effective: _containers.ScalarMap[str, str]
    created_us: int
    version: int
    behind: bool
    created_zxid: int
    def __init__(self, error: _Optional[_Union[_dataport_pb2.Error, _Mapping]] = ..., name: _Optional[str] = ..., topic_id: _Optional[bytes] = ..., config: _Optional[_Mapping[str, str]] = ..., partitions: _Optional[_Iterable[_Union[PartitionDescription, _Mapping]]] = ..., effective: _Optional[_Mapping[str, str]] = ..., created_us: _Optional[int] = ..., version: _Optional[int] = ..., behind: _Optional[bool] = ..., created_zxid: _Optional[int] = ...) -> None: ...

class PartitionDescription(_message.Message):
    __slots__ = ("partition", "leader", "leader_epoch", "replicas", "isr", "error", "extent", "eligible", "adding", "removing", "target", "throttled_rate", "copies")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ISR_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_FIELD_NUMBER: _ClassVar[int]
    ADDING_FIELD_NUMBER: _ClassVar[int]
    REMOVING_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_RATE_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    partition: int
    leader: int
    leader_epoch: int
    replicas: _containers.RepeatedScalarFieldContainer[int]
    isr: _containers.RepeatedScalarFieldContainer[int]
    error: _dataport_pb2.Error
    extent: PartitionExtent
    eligible: _containers.RepeatedScalarFieldContainer[int]
    adding: _containers.RepeatedScalarFieldContainer[int]
    removing: _containers.RepeatedScalarFieldContainer[int]
    target: _containers.RepeatedScalarFieldContainer[int]
    throttled_rate: int
    copies: _containers.RepeatedCompositeFieldContainer[CopyProgress]
    def __init__(self, partition: _Optional[int] = ..., leader: _Optional[int] = ..., leader_epoch: _Optional[int] = ..., replicas: _Optional[_Iterable[int]] = ..., isr: _Optional[_Iterable[int]] = ..., error: _Optional[_Union[_dataport_pb2.Error, _Mapping]] = ..., extent: _Optional[_Union[PartitionExtent, _Mapping]] = ..., eligible: _Optional[_Iterable[int]] = ..., adding: _Optional[_Iterable[int]] = ..., removing: _Optional[_Iterable[int]] = ..., target: _Optional[_Iterable[int]] = ..., throttled_rate: _Optional[int] = ..., copies: _Optional[_Iterable[_Union[CopyProgress, _Mapping]]] = ...) -> None: ...

class CopyProgress(_message.Message):
    __slots__ = ("broker_id", "lacking_bytes")
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    LACKING_BYTES_FIELD_NUMBER: _ClassVar[int]
    broker_id: int
    lacking_bytes: int
    def __init__(self, broker_id: _Optional[int] = ..., lacking_bytes: _Optional[int] = ...) -> None: ...

class PartitionExtent(_message.Message):
    __slots__ = ("start_offset", "end_offset", "size_bytes")
    START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    start_offset: int
    end_offset: int
    size_bytes: int
    def __init__(self, start_offset: _Optional[int] = ..., end_offset: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class CreateTopicRequest(_message.Message):
    __slots__ = ("name", "partitions", "replicas", "config")
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    name: str
    partitions: int
    replicas: int
    config: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., partitions: _Optional[int] = ..., replicas: _Optional[int] = ..., config: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AlterTopicRequest(_message.Message):
    __slots__ = ("name", "set", "unset", "partitions")
    class SetEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    UNSET_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    set: _containers.ScalarMap[str, str]
    unset: _containers.RepeatedScalarFieldContainer[str]
    partitions: int
    def __init__(self, name: _Optional[str] = ..., set: _Optional[_Mapping[str, str]] = ..., unset: _Optional[_Iterable[str]] = ..., partitions: _Optional[int] = ...) -> None: ...

class DeleteTopicRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteTopicReply(_message.Message):
    __slots__ = ("topic_id",)
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    def __init__(self, topic_id: _Optional[bytes] = ...) -> None: ...

class RecoverPartitionsRequest(_message.Message):
    __slots__ = ("topic_id", "partitions", "start_offset")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partitions: _containers.RepeatedScalarFieldContainer[int]
    start_offset: int
    def __init__(self, topic_id: _Optional[bytes] = ..., partitions: _Optional[_Iterable[int]] = ..., start_offset: _Optional[int] = ...) -> None: ...

class RecoverPartitionsReply(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[RecoveredPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[RecoveredPartition, _Mapping]]] = ...) -> None: ...

class RecoveredPartition(_message.Message):
    __slots__ = ("partition", "start_offset", "leader_epoch")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    partition: int
    start_offset: int
    leader_epoch: int
    def __init__(self, partition: _Optional[int] = ..., start_offset: _Optional[int] = ..., leader_epoch: _Optional[int] = ...) -> None: ...

class ReassignPartitionsRequest(_message.Message):
    __slots__ = ("action", "topic", "partitions", "to_brokers", "from_broker", "replication_factor", "throttled_rate", "dry_run")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        BEGIN: _ClassVar[ReassignPartitionsRequest.Action]
        THROTTLE: _ClassVar[ReassignPartitionsRequest.Action]
        CANCEL: _ClassVar[ReassignPartitionsRequest.Action]
    BEGIN: ReassignPartitionsRequest.Action
    THROTTLE: ReassignPartitionsRequest.Action
    CANCEL: ReassignPartitionsRequest.Action
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    TO_BROKERS_FIELD_NUMBER: _ClassVar[int]
    FROM_BROKER_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_RATE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    action: ReassignPartitionsRequest.Action
    topic: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    to_brokers: _containers.RepeatedScalarFieldContainer[int]
    from_broker: int
    replication_factor: int
    throttled_rate: int
    dry_run: bool
    def __init__(self, action: _Optional[_Union[ReassignPartitionsRequest.Action, str]] = ..., topic: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., to_brokers: _Optional[_Iterable[int]] = ..., from_broker: _Optional[int] = ..., replication_factor: _Optional[int] = ..., throttled_rate: _Optional[int] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ReassignPartitionsReply(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[ReassignedPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[ReassignedPartition, _Mapping]]] = ...) -> None: ...

class ReassignedPartition(_message.Message):
    __slots__ = ("topic", "partition", "replicas", "target", "error")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    replicas: _containers.RepeatedScalarFieldContainer[int]
    target: _containers.RepeatedScalarFieldContainer[int]
    error: _dataport_pb2.Error
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., replicas: _Optional[_Iterable[int]] = ..., target: _Optional[_Iterable[int]] = ..., error: _Optional[_Union[_dataport_pb2.Error, _Mapping]] = ...) -> None: ...

class DeleteRecordsRequest(_message.Message):
    __slots__ = ("topic_id", "partition", "before_offset")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    BEFORE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    before_offset: int
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ..., before_offset: _Optional[int] = ...) -> None: ...

class DeleteRecordsReply(_message.Message):
    __slots__ = ("log_start_offset",)
    LOG_START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    log_start_offset: int
    def __init__(self, log_start_offset: _Optional[int] = ...) -> None: ...

class ListOffsetsRequest(_message.Message):
    __slots__ = ("partitions", "max_wait_ms")
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[ListOffset]
    max_wait_ms: int
    def __init__(self, partitions: _Optional[_Iterable[_Union[ListOffset, _Mapping]]] = ..., max_wait_ms: _Optional[int] = ...) -> None: ...

class ListOffset(_message.Message):
    __slots__ = ("topic_id", "partition", "at", "timestamp_us", "from_offset", "max_bytes", "known_offset")
    class At(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LATEST: _ClassVar[ListOffset.At]
        EARLIEST: _ClassVar[ListOffset.At]
        TIMESTAMP: _ClassVar[ListOffset.At]
        AFTER_BYTES: _ClassVar[ListOffset.At]
    LATEST: ListOffset.At
    EARLIEST: ListOffset.At
    TIMESTAMP: ListOffset.At
    AFTER_BYTES: ListOffset.At
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_US_FIELD_NUMBER: _ClassVar[int]
    FROM_OFFSET_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    KNOWN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    at: ListOffset.At
    timestamp_us: int
    from_offset: int
    max_bytes: int
    known_offset: int
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ..., at: _Optional[_Union[ListOffset.At, str]] = ..., timestamp_us: _Optional[int] = ..., from_offset: _Optional[int] = ..., max_bytes: _Optional[int] = ..., known_offset: _Optional[int] = ...) -> None: ...

class ListOffsetsReply(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[ListedOffset]
    def __init__(self, partitions: _Optional[_Iterable[_Union[ListedOffset, _Mapping]]] = ...) -> None: ...

class ListedOffset(_message.Message):
    __slots__ = ("error", "found", "offset", "timestamp_us", "size_bytes", "in_batch")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_US_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_BATCH_FIELD_NUMBER: _ClassVar[int]
    error: _dataport_pb2.Error
    found: bool
    offset: int
    timestamp_us: int
    size_bytes: int
    in_batch: bool
    def __init__(self, error: _Optional[_Union[_dataport_pb2.Error, _Mapping]] = ..., found: _Optional[bool] = ..., offset: _Optional[int] = ..., timestamp_us: _Optional[int] = ..., size_bytes: _Optional[int] = ..., in_batch: _Optional[bool] = ...) -> None: ...

class InitProducerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InitProducerReply(_message.Message):
    __slots__ = ("producer_id", "producer_epoch")
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    producer_id: int
    producer_epoch: int
    def __init__(self, producer_id: _Optional[int] = ..., producer_epoch: _Optional[int] = ...) -> None: ...

class InlineAppendRequest(_message.Message):
    __slots__ = ("request", "body")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    request: _dataport_pb2.AppendRequest
    body: bytes
    def __init__(self, request: _Optional[_Union[_dataport_pb2.AppendRequest, _Mapping]] = ..., body: _Optional[bytes] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("reply", "body")
    REPLY_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    reply: _dataport_pb2.FetchReply
    body: bytes
    def __init__(self, reply: _Optional[_Union[_dataport_pb2.FetchReply, _Mapping]] = ..., body: _Optional[bytes] = ...) -> None: ...

class GroupOffset(_message.Message):
    __slots__ = ("topic", "partition", "offset", "committed_us", "topic_id", "claim", "leader_epoch")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_US_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    committed_us: int
    topic_id: bytes
    claim: int
    leader_epoch: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., committed_us: _Optional[int] = ..., topic_id: _Optional[bytes] = ..., claim: _Optional[int] = ..., leader_epoch: _Optional[int] = ...) -> None: ...

class CommitOffsetsRequest(_message.Message):
    __slots__ = ("group", "offsets", "member", "order", "writer")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    group: str
    offsets: _containers.RepeatedCompositeFieldContainer[GroupOffset]
    member: Membership
    order: int
    writer: int
    def __init__(self, group: _Optional[str] = ..., offsets: _Optional[_Iterable[_Union[GroupOffset, _Mapping]]] = ..., member: _Optional[_Union[Membership, _Mapping]] = ..., order: _Optional[int] = ..., writer: _Optional[int] = ...) -> None: ...

class CommitOffsetsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommittedOffsetsRequest(_message.Message):
    __slots__ = ("group", "topics", "any_id")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    ANY_ID_FIELD_NUMBER: _ClassVar[int]
    group: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    any_id: bool
    def __init__(self, group: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., any_id: _Optional[bool] = ...) -> None: ...

class CommittedOffsetsReply(_message.Message):
    __slots__ = ("offsets",)
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedCompositeFieldContainer[GroupOffset]
    def __init__(self, offsets: _Optional[_Iterable[_Union[GroupOffset, _Mapping]]] = ...) -> None: ...

class ForgetOffsetsRequest(_message.Message):
    __slots__ = ("group", "offsets")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    group: str
    offsets: _containers.RepeatedCompositeFieldContainer[GroupOffset]
    def __init__(self, group: _Optional[str] = ..., offsets: _Optional[_Iterable[_Union[GroupOffset, _Mapping]]] = ...) -> None: ...

class ForgetOffsetsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListGroupsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListGroupsReply(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupSummary]
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupSummary, _Mapping]]] = ...) -> None: ...

class GroupSummary(_message.Message):
    __slots__ = ("group", "topics", "live_members", "kind")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    LIVE_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    group: str
    topics: _containers.RepeatedScalarFieldContainer[str]
    live_members: int
    kind: str
    def __init__(self, group: _Optional[str] = ..., topics: _Optional[_Iterable[str]] = ..., live_members: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class DescribeGroupRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class GroupDescription(_message.Message):
    __slots__ = ("offsets", "members", "generation", "kind", "assignor")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ASSIGNOR_FIELD_NUMBER: _ClassVar[int]
    offsets: _containers.RepeatedCompositeFieldContainer[GroupOffset]
    members: _containers.RepeatedCompositeFieldContainer[GroupMember]
    generation: int
    kind: str
    assignor: str
    def __init__(self, offsets: _Optional[_Iterable[_Union[GroupOffset, _Mapping]]] = ..., members: _Optional[_Iterable[_Union[GroupMember, _Mapping]]] = ..., generation: _Optional[int] = ..., kind: _Optional[str] = ..., assignor: _Optional[str] = ...) -> None: ...

class GroupMember(_message.Message):
    __slots__ = ("member", "subscription", "host", "process", "since_us", "lease_left_ms", "client_id", "instance_id", "session_timeout_ms", "topics", "pattern", "share", "owned")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SINCE_US_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    member: str
    subscription: str
    host: str
    process: str
    since_us: int
    lease_left_ms: int
    client_id: str
    instance_id: str
    session_timeout_ms: int
    topics: _containers.RepeatedScalarFieldContainer[str]
    pattern: str
    share: _containers.RepeatedCompositeFieldContainer[GroupShare]
    owned: _containers.RepeatedCompositeFieldContainer[GroupShare]
    def __init__(self, member: _Optional[str] = ..., subscription: _Optional[str] = ..., host: _Optional[str] = ..., process: _Optional[str] = ..., since_us: _Optional[int] = ..., lease_left_ms: _Optional[int] = ..., client_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., session_timeout_ms: _Optional[int] = ..., topics: _Optional[_Iterable[str]] = ..., pattern: _Optional[str] = ..., share: _Optional[_Iterable[_Union[GroupShare, _Mapping]]] = ..., owned: _Optional[_Iterable[_Union[GroupShare, _Mapping]]] = ...) -> None: ...

class GroupShare(_message.Message):
    __slots__ = ("topic", "partitions")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, topic: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("group", "member", "epoch")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: str
    epoch: int
    def __init__(self, group: _Optional[str] = ..., member: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class JoinGroupRequest(_message.Message):
    __slots__ = ("group", "member", "assignor")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ASSIGNOR_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: GroupMember
    assignor: str
    def __init__(self, group: _Optional[str] = ..., member: _Optional[_Union[GroupMember, _Mapping]] = ..., assignor: _Optional[str] = ...) -> None: ...

class JoinGroupReply(_message.Message):
    __slots__ = ("epoch", "news")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    news: GroupNews
    def __init__(self, epoch: _Optional[int] = ..., news: _Optional[_Union[GroupNews, _Mapping]] = ...) -> None: ...

class GroupNews(_message.Message):
    __slots__ = ("generation", "share", "topics", "claims")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    share: _containers.RepeatedCompositeFieldContainer[GroupShare]
    topics: _containers.RepeatedCompositeFieldContainer[GroupTopic]
    claims: _containers.RepeatedCompositeFieldContainer[GroupClaim]
    def __init__(self, generation: _Optional[int] = ..., share: _Optional[_Iterable[_Union[GroupShare, _Mapping]]] = ..., topics: _Optional[_Iterable[_Union[GroupTopic, _Mapping]]] = ..., claims: _Optional[_Iterable[_Union[GroupClaim, _Mapping]]] = ...) -> None: ...

class GroupTopic(_message.Message):
    __slots__ = ("topic", "topic_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    topic_id: bytes
    def __init__(self, topic: _Optional[str] = ..., topic_id: _Optional[bytes] = ...) -> None: ...

class RenewMemberRequest(_message.Message):
    __slots__ = ("member", "session_timeout_ms")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    member: Membership
    session_timeout_ms: int
    def __init__(self, member: _Optional[_Union[Membership, _Mapping]] = ..., session_timeout_ms: _Optional[int] = ...) -> None: ...

class RenewMemberReply(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class AwaitGroupRequest(_message.Message):
    __slots__ = ("member", "generation", "partitions", "max_wait_ms")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    member: Membership
    generation: int
    partitions: _containers.RepeatedCompositeFieldContainer[GroupShare]
    max_wait_ms: int
    def __init__(self, member: _Optional[_Union[Membership, _Mapping]] = ..., generation: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[GroupShare, _Mapping]]] = ..., max_wait_ms: _Optional[int] = ...) -> None: ...

class AwaitGroupReply(_message.Message):
    __slots__ = ("news", "retry_after_ms")
    NEWS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    news: GroupNews
    retry_after_ms: int
    def __init__(self, news: _Optional[_Union[GroupNews, _Mapping]] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class ClaimPartitionsRequest(_message.Message):
    __slots__ = ("member", "generation", "partitions")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    member: Membership
    generation: int
    partitions: _containers.RepeatedCompositeFieldContainer[GroupShare]
    def __init__(self, member: _Optional[_Union[Membership, _Mapping]] = ..., generation: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[GroupShare, _Mapping]]] = ...) -> None: ...

class ClaimPartitionsReply(_message.Message):
    __slots__ = ("claims", "owners")
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    claims: _containers.RepeatedCompositeFieldContainer[GroupClaim]
    owners: _containers.RepeatedCompositeFieldContainer[GroupOwner]
    def __init__(self, claims: _Optional[_Iterable[_Union[GroupClaim, _Mapping]]] = ..., owners: _Optional[_Iterable[_Union[GroupOwner, _Mapping]]] = ...) -> None: ...

class GroupClaim(_message.Message):
    __slots__ = ("topic", "partition", "claim", "offset", "topic_id", "leader_epoch")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    claim: int
    offset: int
    topic_id: bytes
    leader_epoch: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., claim: _Optional[int] = ..., offset: _Optional[int] = ..., topic_id: _Optional[bytes] = ..., leader_epoch: _Optional[int] = ...) -> None: ...

class GroupOwner(_message.Message):
    __slots__ = ("topic", "partition", "owner")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    owner: str
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., owner: _Optional[str] = ...) -> None: ...

class ReleasePartitionsRequest(_message.Message):
    __slots__ = ("member", "claims", "order")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    member: Membership
    claims: _containers.RepeatedCompositeFieldContainer[GroupClaim]
    order: int
    def __init__(self, member: _Optional[_Union[Membership, _Mapping]] = ..., claims: _Optional[_Iterable[_Union[GroupClaim, _Mapping]]] = ..., order: _Optional[int] = ...) -> None: ...

class ReleasePartitionsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetOffsetsRequest(_message.Message):
    __slots__ = ("group", "offsets", "force", "create")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    group: str
    offsets: _containers.RepeatedCompositeFieldContainer[GroupOffset]
    force: bool
    create: bool
    def __init__(self, group: _Optional[str] = ..., offsets: _Optional[_Iterable[_Union[GroupOffset, _Mapping]]] = ..., force: _Optional[bool] = ..., create: _Optional[bool] = ...) -> None: ...

class ResetOffsetsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteGroupRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class DeleteGroupReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeepMemberRequest(_message.Message):
    __slots__ = ("group", "member", "offsets", "order", "epoch")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: GroupMember
    offsets: _containers.RepeatedCompositeFieldContainer[GroupOffset]
    order: int
    epoch: int
    def __init__(self, group: _Optional[str] = ..., member: _Optional[_Union[GroupMember, _Mapping]] = ..., offsets: _Optional[_Iterable[_Union[GroupOffset, _Mapping]]] = ..., order: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class KeepMemberReply(_message.Message):
    __slots__ = ("first", "epoch")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    first: GroupMember
    epoch: int
    def __init__(self, first: _Optional[_Union[GroupMember, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class LeaveGroupRequest(_message.Message):
    __slots__ = ("group", "member", "epoch")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: str
    epoch: int
    def __init__(self, group: _Optional[str] = ..., member: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class LeaveGroupReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeBrokerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BrokerStatus(_message.Message):
    __slots__ = ("broker_id", "pid", "version", "zookeeper_connected", "counters", "failure", "damaged")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BROKER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ZOOKEEPER_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    broker_id: int
    pid: int
    version: str
    zookeeper_connected: bool
    counters: _containers.ScalarMap[str, int]
    failure: _dataport_pb2.Error
    damaged: _containers.RepeatedCompositeFieldContainer[DamagedRange]
    def __init__(self, broker_id: _Optional[int] = ..., pid: _Optional[int] = ..., version: _Optional[str] = ..., zookeeper_connected: _Optional[bool] = ..., counters: _Optional[_Mapping[str, int]] = ..., failure: _Optional[_Union[_dataport_pb2.Error, _Mapping]] = ..., damaged: _Optional[_Iterable[_Union[DamagedRange, _Mapping]]] = ...) -> None: ...

class DamagedRange(_message.Message):
    __slots__ = ("topic", "partition", "start_offset", "end_offset", "reason")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    start_offset: int
    end_offset: int
    reason: str
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., start_offset: _Optional[int] = ..., end_offset: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class DigestRangeRequest(_message.Message):
    __slots__ = ("topic_id", "partition", "start_offset", "end_offset", "max_bytes")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    start_offset: int
    end_offset: int
    max_bytes: int
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ..., start_offset: _Optional[int] = ..., end_offset: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class RangeDigest(_message.Message):
    __slots__ = ("start_offset", "end_offset", "digest", "batches", "bytes", "damaged", "log_start_offset", "high_watermark")
    START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    LOG_START_OFFSET_FIELD_NUMBER: _ClassVar[int]
    HIGH_WATERMARK_FIELD_NUMBER: _ClassVar[int]
    start_offset: int
    end_offset: int
    digest: int
    batches: int
    bytes: int
    damaged: _containers.RepeatedCompositeFieldContainer[DamagedRange]
    log_start_offset: int
    high_watermark: int
    def __init__(self, start_offset: _Optional[int] = ..., end_offset: _Optional[int] = ..., digest: _Optional[int] = ..., batches: _Optional[int] = ..., bytes: _Optional[int] = ..., damaged: _Optional[_Iterable[_Union[DamagedRange, _Mapping]]] = ..., log_start_offset: _Optional[int] = ..., high_watermark: _Optional[int] = ...) -> None: ...

class RepairPartitionRequest(_message.Message):
    __slots__ = ("topic_id", "partition", "max_wait_ms")
    TOPIC_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    topic_id: bytes
    partition: int
    max_wait_ms: int
    def __init__(self, topic_id: _Optional[bytes] = ..., partition: _Optional[int] = ..., max_wait_ms: _Optional[int] = ...) -> None: ...

class RepairPartitionReply(_message.Message):
    __slots__ = ("done", "damaged")
    DONE_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    done: bool
    damaged: _containers.RepeatedCompositeFieldContainer[DamagedRange]
    def __init__(self, done: _Optional[bool] = ..., damaged: _Optional[_Iterable[_Union[DamagedRange, _Mapping]]] = ...) -> None: ...
