"""Every error that kafkalog raises: a class with the facts, one sentence, a wire code and whether to retry.

An error is raised where the facts are, with those facts as keyword arguments; its sentence is made from the class's
`message` template. On the wire it is a code and its facts as JSON (`to_wire`, `from_wire`), so that the other side
raises the same class with the same facts. Knows nothing of protobuf, sockets or gRPC.
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
        except (KeyError, IndexError, ValueError):  # a newer peer's facts: list them rather than fail
            return f"{type(self).__name__}: {self.facts}"

    def fresh(self, **facts: Any) -> Self:
        """A copy of the error, some facts replaced, without a traceback: its frames would be kept, and it would grow
        each time that the error is raised."""
        return type(self)(**self.facts | facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.facts)

    def to_wire(self) -> tuple[int, str]:
        """The wire code and the facts as JSON text."""
        return self.code, json.dumps(self.facts, sort_keys=True, default=str)


class RetriableError(KafkalogError):
    """An error after which the same request may succeed, perhaps at another broker (Kafka's RetriableException)."""

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
    """The topic was deleted, perhaps created again under the same name with another id."""

    code = 11
    message = "no topic has the id {topic_id}; the topic may have been deleted"


class UnknownPartition(KafkalogError):
    code = 12
    message = "topic '{topic}' has no partition {partition}; it has {partitions}"


class NotLeader(RetriableError):
    code = 13
    message = "broker {broker_id} does not lead partition {partition}"


class LeaderNotAvailable(RetriableError):
    """Facts: `broker_id`, -1 while nobody leads; the sentence then states that."""

    code = 14
    message = "partition {partition} has no live leader: broker {broker_id} is not registered"

    def _sentence(self) -> str:
        if self.facts.get("broker_id") == -1:
            return f"partition {self.facts.get('partition')} has no leader: no live broker has opened its log"
        return super()._sentence()


class TopicExists(KafkalogError):
    code = 15
    message = "topic '{topic}' exists already"


class InvalidTopicName(KafkalogError):
    code = 16
    message = "'{topic}' is not a topic name: use 1 to 249 of the characters a-z A-Z 0-9 . _ - but not '.' or '..'"


class InvalidPartitions(KafkalogError):
    code = 17
    message = "{partitions} is not a valid number of partitions for topic '{topic}': {reason}"


class NoBrokers(RetriableError):
    code = 18
    message = "no broker is registered in the cluster"


class InvalidReplicationFactor(KafkalogError):
    code = 19
    message = (
        "replication factor {replication_factor} is larger than the number of live brokers, {brokers}: start more, "
        "or create the topic with at most {brokers}"
    )


class PartitionLost(KafkalogError):
    """A partition has a state, but its log is not where the state says. It is never served as an empty one."""

    code = 120
    message = (
        "partition {partition} is lost: {reason}; restore its log and restart broker {broker_id}, or accept the "
        "loss of its records: `kafkalog topics recover {topic} --partition {number} --accept-loss`"
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

    For damage in the log whose end is known, the fact `end_offset` is the first offset after it.
    """

    code = 21
    message = "corrupt batch in {partition} at {offset}: {reason}"

    def _sentence(self) -> str:
        sentence = super()._sentence()
        if self.facts.keys() == {"partition", "reason"}:
            sentence = "corrupt batch for {partition}: {reason}".format_map(self.facts)
        if "end_offset" in self.facts:
            sentence += f"; reading can go on at offset {self.facts['end_offset']}"
        return sentence


class NoCommittedOffset(KafkalogError):
    """Facts: `setting`, by which the reader can start elsewhere; a subscribed consumer's is auto.offset.reset. `hint`,
    what else it can do."""

    code = 22
    message = (
        "group '{group}' has committed no offset for {partition}; "
        "set {setting} to earliest or latest to start there instead{hint}"
    )

    def __init__(self, **facts: Any) -> None:
        super().__init__(**{"setting": "committed.fallback", "hint": "", **facts})


# Code 23 must not be used again: for older brokers and clients it is another error.


class DataLost(KafkalogError):
    """A stream cannot continue from its position, because records after it are missing from the log."""

    code = 24
    message = "records to be read are missing from the log: {reason}"


class CommittedOffsetGone(KafkalogError):
    """A group's offset is outside the log, so a read cannot start there."""

    code = 25
    message = (
        "offset {offset}, which group '{group}' has committed for {partition}, is outside "
        "[{start_offset}, {end_offset}]; set committed.fallback to earliest or latest to start there instead"
    )


class UnknownGroup(KafkalogError):
    code = 26
    message = "there is no group '{group}': it has neither committed offsets nor live members{hint}"


class GroupIsLive(KafkalogError):
    """Facts: `left_ms`, after which no member is live unless one renews its lease."""

    code = 27
    message = (
        "group '{group}' has a live member, {member} on {host}, which commits the group's offsets. "
        "A member that has stopped counts as live until its lease ends, in {left_ms} ms at the latest: "
        "stop it and try again then{hint}"
    )


class GroupBusy(RetriableError):
    code = 134
    message = "group '{group}' was not changed: others change it all the time"


class GroupKindDiffers(KafkalogError):
    """A group is read by subscribed consumers, or followed by Spark streams, not by both."""

    code = 190
    message = (
        "group '{group}' has members of the kind {kind}, among them {member} on {host}, so a {other} cannot join it: "
        "stop them first (one that was killed stays a member until its session is over), or use another group"
    )


class AssignorDiffers(KafkalogError):
    code = 191
    message = (
        "the members of group '{group}' share partitions by partition.assignment.strategy={assignor}, not {other}: "
        "give all members the same"
    )


class GroupTooLarge(KafkalogError):
    """A group's state, which is one znode, would not fit it. Nothing was written."""

    code = 196
    message = (
        "the members and partitions of group '{group}' would take {size} bytes in ZooKeeper, at most {limit} are "
        "possible: let its members subscribe to fewer partitions, or use several groups"
    )


class UnknownMember(KafkalogError):
    """The member's lease ended, or it was never there. It owns nothing and has to join again."""

    code = 192
    message = "group '{group}' has no member {member}: it left, or sent no heartbeat for its session.timeout.ms"


class MemberFenced(KafkalogError):
    """Another process joined under the member's name, or the member itself joined again."""

    code = 193
    message = "member {member} of group '{group}' was replaced: another consumer joined as {member} (group.instance.id)"


class StaleGeneration(RetriableError):
    """The group has another generation than the one that a claim is for."""

    code = 135
    message = "group '{group}' is at generation {generation}, not {expected}"


class GroupIsSubscribed(KafkalogError):
    """A commit by a consumer that assigned its partitions itself, to a group whose members subscribe."""

    code = 195
    message = (
        "the offset of {partition} was not committed: the members of group '{group}' share its partitions among "
        "themselves, and {owner} owns this one. Use another group, or subscribe() instead of assign()"
    )


class NotOwner(KafkalogError):
    """A commit to a partition that another member owns, or nobody. Nothing of it was written."""

    code = 194
    message = "{member} does not own {partition} in group '{group}', {owner} does: its offset was not committed"

    def _sentence(self) -> str:
        if not self.facts.get("owner"):
            facts = self.facts
            return (
                f"{facts.get('member')} does not own {facts.get('partition')} in group '{facts.get('group')}', "
                "nobody does now: its offset was not committed"
            )
        return super()._sentence()


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
    message = "producer {producer_id} sent sequence {sequence} to {partition}, but {expected} is next"


class ProducerFenced(KafkalogError):
    code = 34
    message = "producer {producer_id} has epoch {epoch} on {partition}, and is fenced by epoch {current}"


class UnsupportedAcks(KafkalogError):
    code = 35
    message = "acks={acks} is not supported: {reason}"


class BufferExhausted(RetriableError):
    code = 36
    message = "the producer's buffer.memory ({limit} bytes) was full for {waited_ms} ms (max.block.ms, 0 in a callback)"


class DeliveryTimedOut(KafkalogError):
    """The batch was not acknowledged in time; it may or may not be in the log."""

    code = 37
    message = "no ack for {partition} within delivery.timeout.ms ({timeout_ms} ms); last failure: {reason}"


class Closed(KafkalogError):
    code = 38
    message = "this {what} is closed"


class SequenceForgotten(KafkalogError):
    """A batch sent again is older than the deduplication window: the broker cannot know whether it is in the log."""

    code = 39
    message = (
        "producer {producer_id} sent sequence {sequence} to {partition} again, which is older than the deduplication "
        "window, so whether it is in the log is unknown"
    )


class TooManyProducers(RetriableError):
    """The partition keeps the state of `limit` producers, all of them active recently, so none can be forgotten yet."""

    code = 140
    message = "{partition} already keeps the state of {limit} producers, all active recently; raise producer.state.max"


class OutcomeUnknown(KafkalogError):
    """The batch may or may not be in the log, and sending it again might double it, so it is given up."""

    code = 70
    message = "it is unknown whether a batch for {partition} is in the log, and it is not sent again: {reason}"


# --- replication -------------------------------------------------------------------------------------------------


class NotEnoughReplicas(RetriableError):
    """An append with acks=all was refused, and nothing was written."""

    code = 200
    message = (
        "partition {partition} has the in-sync replicas {insync}, fewer than min.insync.replicas ({least}): nothing is "
        "written with acks=all until more have caught up"
    )


class NotEnoughReplicasAfterAppend(RetriableError):
    """The in-sync set became too small after an append; whether the records will last is unknown. Send them again."""

    code = 201
    message = (
        "partition {partition} has the in-sync replicas {insync}, fewer than min.insync.replicas ({least}); whether "
        "the batch will be kept is unknown"
    )


class LogTruncated(OffsetOutOfRange):
    """Records that were read are gone: a leader was elected uncleanly, or a machine lost power (KIP-320). Those before
    end_offset are the same as they were."""

    code = 213
    message = (
        "offset {offset} of {partition} follows records of leader epoch {epoch}, which ended at offset {end_offset}: "
        "the records from there on were lost, and others may have their offsets"
    )


class FencedLeaderEpoch(RetriableError):
    """An append, a fetch, or the beginning of an epoch, in a leader epoch that is not the log's current one: this
    broker leads the partition no longer, or not yet."""

    code = 202
    message = "leader epoch {epoch} of {partition} is not the current one, {current}"


class UnknownLeaderEpoch(RetriableError):
    """The broker has not heard of an election yet."""

    code = 203
    message = "leader epoch {epoch} of {partition} is not known here yet; it is in epoch {current}"


class ConnectionSuperseded(RetriableError):
    """A follower's request came on a connection after which its broker has made another one that is still open."""

    code = 214
    message = "{partition} is fetched on a later connection of broker {broker_id}"


class OffsetNotAvailable(RetriableError):
    """A new leader does not know yet up to where the last one let readers read (KIP-207), or an old one does not know
    whether it leads still."""

    code = 204
    message = (
        "its leader of epoch {leader_epoch} does not know now whether it leads {partition} still, or up to where "
        "readers have read"
    )


class ReplicaDiverged(KafkalogError):
    """A follower would have to cut off records that readers may have seen. It stops following instead."""

    code = 205
    message = (
        "the replica of {partition} is not as its leader, broker {leader}, from offset {offset} on, before its own "
        "high watermark {high_watermark}: acknowledged records were lost there or here"
    )


class UnknownBroker(KafkalogError):
    code = 206
    message = "broker {broker_id} is not registered in the cluster; live are {brokers}"


class ReassignmentInProgress(KafkalogError):
    code = 207
    message = (
        "partition {partition} is being moved to brokers {target} already: wait until it is there, or cancel that "
        "first: `kafkalog topics reassign {topic} --cancel`"
    )


class ReassignmentNotCancelled(RetriableError):
    code = 208
    message = (
        "partition {partition} cannot go back to brokers {replicas}: none of them is live and has all acknowledged "
        "records; the in-sync replicas are {insync}"
    )


class TooFewBrokers(KafkalogError):
    code = 209
    message = (
        "{partition} with {replication_factor} replicas needs as many brokers, and only {brokers} may be used: start "
        "another broker, name more, or give a replication factor of at most {brokers}"
    )


LEADER_CHANGES = (
    NotLeader,
    LeaderNotAvailable,
    FencedLeaderEpoch,
    UnknownLeaderEpoch,
    OffsetNotAvailable,
)
"""What an election of a leader brings with it: it is over within moments, so it is retried with short pauses."""


# --- storage -----------------------------------------------------------------------------------------------------


class StorageFailed(KafkalogError):
    """The log directory is out of service after a failed read, write or fdatasync; its files are not used any more."""

    code = 40
    message = "log directory {directory} is out of service: {reason}"


class DiskFull(RetriableError):
    code = 41
    message = "no space left on the disk of {directory}"


class OutOfFiles(DiskFull):
    """No descriptor or memory is left to open a file. As with a full disk, nothing was done; try again."""

    code = 44
    message = "the broker cannot open a file of {directory} now: {reason}"


class FileRefused(KafkalogError):
    """The broker has no right to a file or folder of a log, or something else has its name. This affects one log only,
    and is not a failure of the disk."""

    code = 110
    message = "the broker cannot use a file of {directory}: {reason}"


class DataDirInUse(KafkalogError):
    code = 42
    message = "data directory {directory} is in use by another process ({pid})"


class ClusterMismatch(KafkalogError):
    code = 43
    message = (
        "data directory {directory} belongs to {expected}, not to {actual}: correct {settings}, or give another log.dir"
    )


# --- requests, connections, limits ---------------------------------------------------------------------------------


class InvalidRequest(KafkalogError):
    code = 50
    message = "invalid request: {reason}"


class ProtocolError(KafkalogError):
    """The peer does not speak this protocol, or not this version; the connection is closed."""

    code = 51
    message = "{address}: {reason}"


class NoCommonVersion(ProtocolError):
    """One of the two is too old for the other: upgrade it."""

    code = 210
    message = "{address} speaks the protocol versions {theirs}, and this side {ours}: they have none in common"


class FormatLevelNotUnderstood(KafkalogError):
    """The broker does not start, or is not registered any more: it could not read what others have written."""

    code = 211
    message = (
        "the cluster has format level {level}, and broker {broker_id} understands {understood}: "
        "start a version of the broker that understands level {level}"
    )


class FormatLevelNotRaised(KafkalogError):
    code = 212
    message = "the cluster's format level stays {level}: {reason}"


class TooManyConnections(RetriableError):
    code = 52
    message = "the broker already has {limit} connections (max.connections)"


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
    """No answer came. Whether a requested write was executed, or will be, is unknown."""

    code = 55
    message = "ZooKeeper at {address} is not reachable: {reason}"


class ZooKeeperNotAsked(ZooKeeperUnreachable):
    """The request was not sent, and never will be: as if it had not been made."""

    code = 130
    message = "ZooKeeper at {address} is not reachable: {reason} (the request was not sent)"


class UnreadableZnode(KafkalogError):
    """Only what is in this znode cannot be used."""

    code = 182
    message = "znode {path} in ZooKeeper cannot be read: {reason}"


class TooLargeForZooKeeper(KafkalogError):
    """Nothing was written: ZooKeeper would have ended the connection, again at every retry."""

    code = 131
    message = (
        "the request to write {path} has {size} bytes, and ZooKeeper accepts {limit} (its jute.maxbuffer): "
        "use fewer partitions or shorter ids"
    )


class RequestTimedOut(RetriableError):
    code = 56
    message = "{what} at {address} did not finish within {timeout_ms} ms"


class AddressInUse(KafkalogError):
    code = 57
    message = "{address} is in use by another process (setting {setting})"


class InternalError(KafkalogError):
    """A defect of the broker; its log has the traceback."""

    code = 58
    message = "the broker failed on this request: {reason}"

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The InternalError that a client gets for an unexpected exception."""
        return cls(reason=f"{type(error).__name__}: {error}")


class BrokerBusy(RetriableError):
    """The call was not begun: too many calls are queued, or too many bytes of answers are not sent yet."""

    code = 59
    message = "broker {broker} is busy: {reason}; try again"


class OutOfThreads(RetriableError):
    """The machine cannot start another thread now. The request was not begun; try again."""

    code = 160
    message = "{process} cannot start a thread now: {reason}; try again"


# --- transactions ------------------------------------------------------------------------------------------------


class StagedPartLost(KafkalogError):
    """Staged rows were lost before they were in the log: a disk was lost, or a part was never complete."""

    code = 90
    message = "staged rows of transaction '{transactional_id}', batch {batch_id}, for {partition} are lost: {reason}"


class DecisionMoved(KafkalogError):
    """Another coordinator, or a leader that expires a prepared set, wrote the decision first. Read it again."""

    code = 91
    message = (
        "the decision of transaction '{transactional_id}' has version {version}, not {expected}: another process "
        "wrote it"
    )


class CheckpointCopied(KafkalogError):
    """The checkpoint does not match the decision: an old one was restored, or a copy is running elsewhere."""

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
    """Raised by the command line; brokers return an empty decision for such a transaction."""

    code = 180
    message = "there is no transaction '{transaction}': nothing of it is decided or staged{hint}"


class VersionOfAnother(KafkalogError):
    """A numbered write whose version was recorded by another query, or by none. Skipping it could lose its rows."""

    code = 150
    message = (
        "version {version} of txnAppId '{app_id}' is not above version {recorded}, which {recorded_by} wrote to topic "
        "'{topic}', and this write belongs to {writer}. Skipping the write could lose its rows. Give it another "
        "txnAppId, or restart the count with `kafkalog transactions forget {command}`"
    )


class QueryNotKnown(KafkalogError):
    """A numbered write of a streaming query that cannot be distinguished from another's of the same txnAppId."""

    code = 111
    message = (
        "the query that writes version {version} of txnAppId '{app_id}' is not known, so the write cannot be "
        "distinguished from another query's write of that version: {reason}. Give the write the query's own "
        "checkpointLocation as an option, on a file system that the driver can read"
    )


class VersionWrittenTwice(KafkalogError):
    """A second numbered write to a topic in one micro-batch. Skipping it could lose its rows."""

    code = 153
    message = (
        "run {run} has another write of version {version} of txnAppId '{app_id}' to topic '{topic}'. Skipping the "
        "write could lose its rows. Two writes to one topic need a txnAppId each: the write whose rows are in the "
        "topic keeps this name, the other gets a new one. If this is a retry of the same write, let the query fail and "
        "restart it: it then skips the writes that are in the topic"
    )


class CountMoved(KafkalogError):
    """During a numbered write, its count was forgotten or its topic was created again. Write it again."""

    code = 151
    message = (
        "while version {version} of transaction '{transactional_id}' was being written, its count was forgotten or its "
        "topic was created again; none of its rows are in the topic, so write it again"
    )


class NoProgress(RetriableError):
    """Why a commit is delayed: a broker repeatedly answers that it is still working, without progress."""

    code = 154
    message = "{what} at {address} is not finished, and has made no progress for {seconds} s"


class CommitTimedOut(KafkalogError):
    """A commit was given up. The fact `decided` is yes, no or unknown: only after no may the rows be written again."""

    code = 152
    message = (
        "the commit of transaction '{transactional_id}', batch {batch_id}, made no progress for {timeout_ms} ms: "
        "{reason} - {outcome}"
    )


class StagedOutOfOrder(RetriableError):
    """A gap in a staged part: send again from `expected`, in order."""

    code = 94
    message = "part {part} for {partition} got batch {sequence}, but {expected} is next"


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
    """A signal handler (or a `__del__`) called the producer whose call it had interrupted, and would wait for ever."""

    code = 161
    message = (
        "a signal handler interrupted a call of this producer and then called the producer; the interrupted call must "
        "end first: set a flag in the handler, and call flush() in the main program"
    )


class CheckpointOfOthers(KafkalogError):
    """A stream's options do not select all partitions in its checkpoint: one of the two is a mistake."""

    code = 170
    message = (
        "the checkpoint has {checkpoint}, but the options select {options}: give the query its own checkpointLocation, "
        "or select {checkpoint} again"
    )


class LocalClusterEnded(KafkalogError):
    """The guard (`broker/local/guard.py`) was killed, or ended by a signal; its processes end with it."""

    code = 181
    message = (
        "the guard process of the local cluster in {root} has ended, and its brokers and ZooKeeper with it: start "
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
