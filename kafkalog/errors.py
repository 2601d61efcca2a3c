"""Every error that kafkalog raises: a class with the facts, one sentence, a wire code and whether to retry.

An error is raised where the facts are, with those facts as keyword arguments; its sentence is made from the class's
`message` template. On the wire it is a code and its facts as JSON (`to_wire`, `from_wire`), so that the same class
with the same facts rises on the other side. Knows nothing of protobuf, sockets or gRPC.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Self


class KafkalogError(Exception):
    """Base of every kafkalog error.

    Args:
        **facts: the values named in the class's `message` template (JSON-able: str, int, float, bool, None).
    """

    code: ClassVar[int] = 1
    retriable: ClassVar[bool] = False
    message: ClassVar[str] = "{reason}"

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        try:
            return self.message.format_map(self.facts)
        except (KeyError, IndexError, ValueError):  # facts of a newer peer: say what there is rather than fail
            return f"{type(self).__name__}: {self.facts}"

    def fresh(self, **facts: Any) -> Self:
        """The same error anew, some facts replaced: without a traceback, whose frames would be kept, or grow each time
        that it is raised."""
        return type(self)(**self.facts | facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.facts)

    def to_wire(self) -> tuple[int, str]:
        """The wire code and the facts as JSON text."""
        return self.code, json.dumps(self.facts, sort_keys=True, default=str)


class RetriableError(KafkalogError):
    """What the same request may succeed after, perhaps at another broker (Kafka's RetriableException)."""

    retriable = True


def _rebuild(cls: type[KafkalogError], facts: dict[str, Any]) -> KafkalogError:
    return cls(**facts)


def from_wire(code: int, facts_json: str) -> KafkalogError:
    """The error that `to_wire` described; an unknown code becomes a plain `KafkalogError`."""
    try:
        facts = json.loads(facts_json) if facts_json else {}
    except ValueError:
        facts = {"reason": facts_json}
    if not isinstance(facts, dict):
        facts = {"reason": str(facts)}
    cls = BY_CODE.get(code)
    if cls is None:
        return KafkalogError(reason=f"error {code} of a newer peer: {facts}")
    return cls(**{str(name): value for name, value in facts.items()})


# --- topics and partitions ---------------------------------------------------------------------------------------


class UnknownTopic(KafkalogError):
    code = 10
    message = "there is no topic '{topic}'"


class UnknownTopicId(RetriableError):
    """The topic was deleted (perhaps created again under the same name, with another id)."""

    code = 11
    message = "no topic has the id {topic_id} (any more)"


class UnknownPartition(KafkalogError):
    code = 12
    message = "topic '{topic}' has no partition {partition}; it has {partitions}"


class NotLeader(RetriableError):
    code = 13
    message = "broker {broker_id} does not lead partition {partition}"


class LeaderNotAvailable(RetriableError):
    code = 14
    message = (
        "partition {partition} has no live leader: broker {broker_id} is not registered "
        "(-1: no broker has opened its log yet)"
    )


class TopicExists(KafkalogError):
    code = 15
    message = "topic '{topic}' exists already"


class InvalidTopicName(KafkalogError):
    code = 16
    message = "'{topic}' is no topic name: 1 to 249 of the characters a-z A-Z 0-9 . _ - and not '.' or '..'"


class InvalidPartitions(KafkalogError):
    code = 17
    message = "{partitions} is not a number of partitions for topic '{topic}': {reason}"


class NoBrokers(RetriableError):
    code = 18
    message = "no broker is registered in the cluster"


class PartitionLost(KafkalogError):
    """A partition has a state, but its log is not where the state says. It is never served as an empty one."""

    code = 120
    message = (
        "partition {partition} is lost: {reason}; put it back and restart broker {broker_id}, or give up what "
        "was in it: `kafkalog topics recover {topic} --partition {number} --accept-loss`"
    )


class NotLost(KafkalogError):
    code = 121
    message = "partition {partition} is not lost, so there is nothing to recover"


# --- reading -----------------------------------------------------------------------------------------------------


class OffsetOutOfRange(KafkalogError):
    code = 20
    message = "offset {offset} of {partition} is outside [{start_offset}, {end_offset}]"


class CorruptBatch(KafkalogError):
    """Bytes that fail their check: in the log (offsets known), or in a request.

    Of damage in the log whose end is known, the fact `end_offset` is the first offset after it.
    """

    code = 21
    message = "corrupt batch in {partition} at {offset}: {reason}"

    def _sentence(self) -> str:
        sentence = super()._sentence()
        if "end_offset" in self.facts:
            sentence += f"; reading can go on at offset {self.facts['end_offset']}"
        return sentence


class NoCommittedOffset(KafkalogError):
    code = 22
    message = (
        "group '{group}' has committed no offset for {partition} "
        "(committed.fallback says where to start then: earliest or latest)"
    )


# Code 23 is not to be given again: older brokers and clients have another error by it.


class DataLost(KafkalogError):
    """A stream can not go on from its position: records between it and the present are not in the log (any more)."""

    code = 24
    message = "records that were to be read are not in the log (any more): {reason}"


class CommittedOffsetGone(KafkalogError):
    """A group's offset names a record that the log has not (any more), so it is no place to start."""

    code = 25
    message = (
        "offset {offset}, which group '{group}' has committed for {partition}, is outside "
        "[{start_offset}, {end_offset}] (committed.fallback says where to start then: earliest or latest)"
    )


class UnknownGroup(KafkalogError):
    code = 26
    message = "no group is called '{group}': none has committed an offset or has a live member under that name{hint}"


class GroupIsLive(KafkalogError):
    """Facts: `left_ms`, after which no member is live unless one renews its lease."""

    code = 27
    message = (
        "group '{group}' has a live member, {member} on {host}, which goes on writing the group's offsets. "
        "One that has stopped counts as live until its lease ends, at the latest in {left_ms} ms: "
        "stop it and try again then{hint}"
    )


class MembershipMoved(RetriableError):
    """The member lapsed, left, or was renewed through another broker while its offsets were being written."""

    code = 132
    message = "the offsets of member {member} of group '{group}' were not written: its membership changed meanwhile"


# --- writing -----------------------------------------------------------------------------------------------------


class RecordTooLarge(KafkalogError):
    code = 30
    message = (
        "a record of {size} bytes for topic '{topic}' is larger than its max.message.bytes of {limit} "
        "(raise it with `kafkalog topics alter`, or send smaller records)"
    )


class BatchTooLarge(KafkalogError):
    code = 31
    message = "a batch of {size} bytes for {partition} is larger than its max.message.bytes of {limit}"


class RequestTooLarge(KafkalogError):
    code = 32
    message = "a request of {size} bytes is larger than the broker's {setting} of {limit}"


class OutOfOrderSequence(RetriableError):
    """A gap in a producer's sequence: an earlier batch is missing. Send again from `expected`, in order."""

    code = 33
    message = "producer {producer_id} sent sequence {sequence} to {partition} where {expected} comes next"


class ProducerFenced(KafkalogError):
    code = 34
    message = "producer {producer_id} has epoch {epoch} on {partition} but {current} is in use"


class UnsupportedAcks(KafkalogError):
    code = 35
    message = "acks={acks} is not supported: {reason}"


class BufferExhausted(RetriableError):
    code = 36
    message = "the producer's buffer.memory of {limit} bytes stayed full for max.block.ms ({waited_ms} ms)"


class DeliveryTimedOut(KafkalogError):
    """The batch was not acknowledged in time; it may or may not be in the log."""

    code = 37
    message = "no ack for {partition} within delivery.timeout.ms ({timeout_ms} ms); last failure: {reason}"


class Closed(KafkalogError):
    code = 38
    message = "this {what} is closed"


class SequenceForgotten(KafkalogError):
    """An older batch than the broker remembers was sent again: whether it is in the log cannot be told."""

    code = 39
    message = "producer {producer_id} sent sequence {sequence} to {partition} again, older than those remembered"


class TooManyProducers(RetriableError):
    """All producers that the partition keeps the state of were active just now; none of them can be forgotten yet."""

    code = 140
    message = "{partition} keeps the state of {limit} producers already, all active lately; raise producer.state.max"


class OutcomeUnknown(KafkalogError):
    """The batch may or may not be in the log, and sending it again might double it, so it is given up."""

    code = 70
    message = "whether a batch for {partition} is in the log is unknown, and it is not sent again: {reason}"


# --- storage -----------------------------------------------------------------------------------------------------


class StorageFailed(KafkalogError):
    """The log directory is out of service after a failed write or fdatasync; nothing of it is read or written."""

    code = 40
    message = "log directory {directory} is out of service: {reason}"


class DiskFull(RetriableError):
    code = 41
    message = "no space left on the disk of {directory}"


class OutOfFiles(DiskFull):
    """No descriptor or memory to open a file with: as with a full disk, nothing was done and it passes."""

    code = 44
    message = "the broker cannot open a file of {directory} now: {reason}"


class FileRefused(KafkalogError):
    """Of a log that is to be opened, or of what is to be deleted, a file or folder may not be used, or something else
    has its name. It concerns one log alone, and says nothing of the disk."""

    code = 110
    message = "the broker cannot use a file of {directory}: {reason}"


class DataDirInUse(KafkalogError):
    code = 42
    message = "data directory {directory} is in use by another process ({pid})"


class ClusterMismatch(KafkalogError):
    code = 43
    message = "data directory {directory} belongs to {expected}, not to {actual}"


# --- requests, connections, limits ---------------------------------------------------------------------------------


class InvalidRequest(KafkalogError):
    code = 50
    message = "bad request: {reason}"


class ProtocolError(KafkalogError):
    """The peer does not speak this protocol, or not this version; the connection is closed."""

    code = 51
    message = "{address}: {reason}"


class TooManyConnections(RetriableError):
    code = 52
    message = "the broker has its {limit} connections (max.connections)"


class BrokerStopping(RetriableError):
    code = 53
    message = "broker {broker_id} is stopping"


class BrokerUnreachable(RetriableError):
    code = 54
    message = "no broker reachable at {address}: {reason}"


class BrokerNotAsked(BrokerUnreachable):
    """The request was not sent, and never will be: as if it had not been made."""

    code = 133
    message = "no broker reachable at {address}: {reason} (the request was not sent)"


class ZooKeeperUnreachable(RetriableError):
    """No answer came. Whether a write that it was asked for happened, or happens yet, is unknown."""

    code = 55
    message = "ZooKeeper at {address} is not reachable: {reason}"


class ZooKeeperNotAsked(ZooKeeperUnreachable):
    """The request was not sent, and never will be: as if it had not been made."""

    code = 130
    message = "ZooKeeper at {address} is not reachable: {reason} (the request was not sent)"


class TooLargeForZooKeeper(KafkalogError):
    """Nothing was written: ZooKeeper would have ended the connection, again at every retry."""

    code = 131
    message = (
        "{path} would be written with a request of {size} bytes, and ZooKeeper takes {limit} (its jute.maxbuffer): "
        "write less at once, as fewer partitions or shorter ids"
    )


class RequestTimedOut(RetriableError):
    code = 56
    message = "{what} at {address} did not answer within {timeout_ms} ms"


class AddressInUse(KafkalogError):
    code = 57
    message = "{address} is in use by another process (setting {setting})"


class InternalError(KafkalogError):
    """A defect of the broker; its log has the traceback."""

    code = 58
    message = "the broker failed on this request: {reason}"

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """What became of a mistake of ours, for who asked."""
        return cls(reason=f"{type(error).__name__}: {error}")


class BrokerBusy(RetriableError):
    """The call was not begun, for too many wait before it, or too many bytes of answers wait for who asked for them."""

    code = 59
    message = "broker {broker} is busy: {reason}; try again"


class OutOfThreads(RetriableError):
    """The machine has no thread left for what was asked; nothing of it was begun, and it passes."""

    code = 160
    message = "{process} cannot start a thread now: {reason}; try again"


# --- transactions ------------------------------------------------------------------------------------------------


class StagedPartLost(KafkalogError):
    """Rows that were staged are gone before they came into the log: a disk was lost, or a part was never whole."""

    code = 90
    message = "what was staged of transaction '{transactional_id}', batch {batch_id}, for {partition} is lost: {reason}"


class DecisionMoved(KafkalogError):
    """Another coordinator, or a leader that times a prepared set out, wrote the decision first. Read it again."""

    code = 91
    message = "the decision of transaction '{transactional_id}' moved from version {expected} to {version}"


class CheckpointCopied(KafkalogError):
    """The checkpoint does not fit what was decided: an old one was restored, or a copy is running elsewhere."""

    code = 92
    message = (
        "batch {batch_id} of transaction '{transactional_id}' does not fit the topic, so the checkpoint is an old one "
        "or a copy of another's: {reason}"
    )


class RunFenced(KafkalogError):
    code = 93
    message = (
        "run {run_id} of transaction '{transactional_id}' was replaced by run {other}; "
        "only the newest run of a query may write"
    )


class UnknownTransaction(KafkalogError):
    """Said by the command line; brokers answer that nothing is decided of such a transaction."""

    code = 180
    message = "nothing is decided or staged of a transaction '{transaction}'{hint}"


class VersionOfAnother(KafkalogError):
    """A numbered write whose version was recorded by another query, or by none. Skipping it could lose its rows."""

    code = 150
    message = (
        "version {version} of txnAppId '{app_id}' is not above version {recorded}, which {recorded_by} wrote to topic "
        "'{topic}', and this write belongs to {writer}. Skipping the write could lose its rows. Give it another "
        "txnAppId, or start the count anew with `kafkalog transactions forget {command}`"
    )


class QueryNotKnown(KafkalogError):
    """A numbered write of a streaming query that cannot be told from another query's under the same txnAppId."""

    code = 111
    message = (
        "which query writes version {version} of txnAppId '{app_id}' is not known, so it cannot be told from another "
        "query's version of that number: {reason}. Give the write the query's own checkpointLocation as an option, on "
        "a file system that the driver can read"
    )


class VersionWrittenTwice(KafkalogError):
    """A second numbered write to a topic in one micro-batch. Skipping it could lose its rows."""

    code = 153
    message = (
        "run {run} has another write of version {version} of txnAppId '{app_id}' to topic '{topic}'. Skipping the "
        "write could lose its rows. Two writes to one topic need a txnAppId each: the one whose rows are in the topic "
        "keeps this name, the other gets a new one. If this is the same write, tried again, let the query fail: once "
        "restarted it skips what is written"
    )


class CountMoved(KafkalogError):
    """A numbered write met `kafkalog transactions forget`, or its topic was made anew. Write it again."""

    code = 151
    message = (
        "while version {version} of transaction '{transactional_id}' was being written, its count was forgotten or its "
        "topic was made anew; nothing of it is in the topic, so write it again"
    )


class NoProgress(RetriableError):
    """Why a commit is held up: a broker answers that it works at something, and every time the same."""

    code = 154
    message = "{what} at {address} is not finished, and has made no progress for {seconds} s"


class CommitTimedOut(KafkalogError):
    """A commit was given up. `decided`: yes, no, or unknown, which says whether to write again."""

    code = 152
    message = (
        "the commit of transaction '{transactional_id}', batch {batch_id}, made no progress for {timeout_ms} ms: "
        "{reason} - {outcome}"
    )


class StagedOutOfOrder(RetriableError):
    """A gap in a staged part: send again from `expected`, in order."""

    code = 94
    message = "part {part} for {partition} was sent batch {sequence} when {expected} was expected"


# --- settings and options ------------------------------------------------------------------------------------------


class UnknownSetting(KafkalogError):
    code = 60
    message = "there is no {what} setting '{name}'{hint}"


class InvalidSetting(KafkalogError):
    code = 61
    message = "{name}={value!r} is not valid: {reason}"


class InvalidArgument(KafkalogError):
    """A wrong argument of a call, a wrong column type, a wrong option."""

    code = 62
    message = "{reason}"


class ReentrantCall(KafkalogError):
    """A signal handler (or a `__del__`) called the producer whose call it had interrupted: it would wait for ever."""

    code = 161
    message = (
        "a signal handler interrupted a call of this producer and then called the producer; the interrupted call must "
        "end first: set a flag in the handler, and call flush() in the main program"
    )


class CheckpointOfOthers(KafkalogError):
    """A stream was started with options that leave out what its checkpoint is of: one of the two is a mistake."""

    code = 170
    message = (
        "the checkpoint is of {checkpoint}, and the options say {options}: give the query a checkpointLocation of its "
        "own, or select {checkpoint} again"
    )


class LocalClusterEnded(KafkalogError):
    """The guard (`broker/local/guard.py`) was killed, or ended by a signal; its processes end with it."""

    code = 181
    message = (
        "the process that holds the local cluster in {root} has ended, and its brokers and ZooKeeper with it: start "
        "the cluster again"
    )


class MissingDependency(KafkalogError):
    code = 63
    message = "{what} was not found: {reason}"


def _all_errors(cls: type[KafkalogError]) -> list[type[KafkalogError]]:
    found = [cls] if cls is not RetriableError else []
    for sub in cls.__subclasses__():
        found += _all_errors(sub)
    return found


BY_CODE: dict[int, type[KafkalogError]] = {cls.code: cls for cls in _all_errors(KafkalogError)}
assert len(BY_CODE) == len(_all_errors(KafkalogError)), "two errors share a wire code"
