"""The gRPC port: the control service of broker.proto, with the standard health and reflection services.

Converts messages to calls of `broker/requests`, and errors to statuses. gRPC in Python makes at most 2.5 k calls/s, so
the hot paths are on the data port; `Append` and `Pull` are for simple clients.

gRPC holds a message in memory, and several times over: a client's is at most 2 MiB and a little, and the answers of all
`Pull`s under way, until they are sent, at most 16 MiB. `lanes.py` defines which threads answer a method. At most 16
listings wait for a partition's end to move and 8 `Pull`s for data or memory, which leaves threads to those that do not.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from broker.config import BrokerSettings
from broker.groups.membership import Groups
from broker.groups.waits import GroupWaits
from broker.ports import check_port_free
from broker.replica.host import Host
from broker.replica.jobs import StagedJobs
from broker.replica.partition import Partition
from broker.replica.scrubber import Scrubber
from broker.requests import (
    append,
    cluster,
    decisions,
    fetch,
    groups,
    members,
    offsets,
    reassignments,
    staging,
    topics,
    verify,
    waits,
)
from broker.transport.connection import FETCHED_PARTITIONS_MAX, WRITTEN_PARTITIONS_MAX, too_many_partitions
from broker.transport.lanes import LANES, QUEUED_MAX, Lane, Lanes, MessageOverdue, is_refusing
from broker.transport.memory_pool import MemoryPool
from kafkalog.clock import Clock
from kafkalog.errors import (
    AddressInUse,
    BrokerBusy,
    BrokerStopping,
    GroupTooLarge,
    InternalError,
    InvalidPartitions,
    InvalidReplicationFactor,
    InvalidRequest,
    InvalidSetting,
    InvalidTopicName,
    KafkalogError,
    RequestTooLarge,
    TooFewBrokers,
    TooLargeForZooKeeper,
    TopicExists,
    UnknownBroker,
    UnknownGroup,
    UnknownPartition,
    UnknownSetting,
    UnknownTopic,
    UnknownTopicId,
)
from kafkalog.events import get_logger
from kafkalog.format.producer_ids import new_producer_id
from kafkalog.wire import broker_pb2, transactions_pb2
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_to_wire
from kafkalog.wire.service import METHODS, SERVICE

log = get_logger(__name__)

_Found = TypeVar("_Found")
_Method = Callable[[Any, grpc.ServicerContext], Message]
"""Of the service: (request, context) -> reply."""

ERROR_KEY = "kafkalog-error-bin"
_LISTINGS_WAITING_MAX = 16
_PULLS_WAITING_MAX = 8
_GROUP_WAIT_MS_MAX = 60_000
_DESCRIBED_TOPICS_MAX = 50_000  # named in one call
_CALLS_MAX = len(LANES) * QUEUED_MAX + 512
"""Beyond what lanes queue, those that are being refused; gRPC itself refuses more, also those of a lane with room."""
_INLINE_MAX = 2 << 20
_ANSWERS_MAX = 16 << 20
_BUSY_SECONDS = 2.0
_MESSAGE_MAX = _INLINE_MAX + (256 << 10)
_KEEPALIVE_MS = 60_000
_KEEPALIVE_TIMEOUT_MS = 20_000
_ERROR_MAX = 3 << 10  # in base64, beside a percent-encoded sentence, less than the 8 KiB that clients take
_SENTENCE_MAX = 1000

_INVALID = (
    GroupTooLarge,
    InvalidPartitions,
    InvalidReplicationFactor,
    InvalidRequest,
    InvalidSetting,
    InvalidTopicName,
    TooFewBrokers,
    TooLargeForZooKeeper,
    UnknownBroker,
    UnknownSetting,
)
_MISSING = (UnknownGroup, UnknownTopic, UnknownTopicId, UnknownPartition)


class BrokerService:
    """Every method of the service, by its name; one line each, because `broker/requests` has the logic.

    Args:
        counters: for the answer of `DescribeBroker`.
    """

    def __init__(
        self,
        host: Host,
        settings: BrokerSettings,
        clock: Clock,
        cluster_id: str,
        version: str,
        counters: Callable[[], dict[str, int]],
        jobs: StagedJobs,
        group_changes: Groups,
        scrubber: Scrubber,
    ) -> None:
        self._host = host
        self._settings = settings
        self._clock = clock
        self._cluster_id = cluster_id
        self._version = version
        self._counters = counters
        self._listings_waiting = threading.BoundedSemaphore(_LISTINGS_WAITING_MAX)
        self._pulls_waiting = threading.BoundedSemaphore(_PULLS_WAITING_MAX)
        self._answers = MemoryPool(_ANSWERS_MAX)
        self._stopping = threading.Event()
        self._staged_jobs = jobs
        self._groups = group_changes
        self._scrubber = scrubber
        self._group_waits = GroupWaits()

    def stop_waiting(self) -> None:
        """Answer all waiting calls, and refuse changes from now on."""
        self._stopping.set()
        self._groups.states.wake_all()
        self._staged_jobs.stop()
        self._scrubber.stop()
        for partition in self._host.hosted.values():
            partition.waiters.wake()

    def method(self, name: str, lane: str) -> _Method:
        """A method of the service, to be called in a thread of its lane. A request to ZooKeeper stops when the client
        gives up. A change of topics, which is slow anyway, waits if the connection to ZooKeeper is lost for a
        moment."""
        method: _Method = getattr(self, name)
        session = self._host.metadata.session

        def for_who_waits(request: Any, context: grpc.ServicerContext) -> Message:
            with session.on_behalf_of(context.is_active):
                return method(request, context)

        def patiently(request: Any, context: grpc.ServicerContext) -> Message:
            with session.patient():
                return method(request, context)

        if lane in ("zookeeper", "leases", "groups"):
            return for_who_waits
        return patiently if lane == "topics" else method

    def DescribeCluster(self, request: broker_pb2.DescribeClusterRequest, context: Any) -> Any:
        return cluster.describe_cluster(request, self._host, self._cluster_id)

    def DescribeController(self, request: broker_pb2.DescribeControllerRequest, context: Any) -> Any:
        return cluster.describe_controller(request, self._host)

    def UpgradeCluster(self, request: broker_pb2.UpgradeClusterRequest, context: Any) -> Any:
        return cluster.upgrade_cluster(request, self._host)

    def DescribeBroker(self, request: broker_pb2.DescribeBrokerRequest, context: Any) -> Any:
        failed = self._host.failed
        return broker_pb2.BrokerStatus(
            failure=None if failed is None else error_to_wire(failed),
            broker_id=self._host.broker_id,
            pid=os.getpid(),
            version=self._version,
            zookeeper_connected=self._host.metadata.session.connected,
            counters=self._counters()
            | {
                "staged.bytes": staging.staged_bytes(self._host),
                "disk.full": int(self._host.is_full),
                "partitions.served": len(self._host.hosted),
                "partitions.unserved": len(self._host.unserved()),
                "scrub.checked_bytes": self._scrubber.checked_bytes,
                "scrub.repaired_ranges": self._scrubber.repaired_ranges,
            },
            damaged=verify.damaged_ranges(self._scrubber),
        )

    def DescribeTopics(self, request: broker_pb2.DescribeTopicsRequest, context: Any) -> Any:
        if (named := len(request.names) + len(request.ids)) > _DESCRIBED_TOPICS_MAX:
            reason = f"the call names {named} topics; the limit for one call is {_DESCRIBED_TOPICS_MAX}"
            raise InvalidRequest(reason=reason)
        return topics.describe_topics(request, self._host, self._cluster_id)

    def CreateTopic(self, request: broker_pb2.CreateTopicRequest, context: Any) -> Any:
        return topics.create_topic(request, self._host, _seconds_left(context))

    def AlterTopic(self, request: broker_pb2.AlterTopicRequest, context: Any) -> Any:
        return topics.alter_topic(request, self._host, _seconds_left(context))

    def DeleteTopic(self, request: broker_pb2.DeleteTopicRequest, context: Any) -> Any:
        return topics.delete_topic(request, self._host, _seconds_left(context))

    def RecoverPartitions(self, request: broker_pb2.RecoverPartitionsRequest, context: Any) -> Any:
        return topics.recover_partitions(request, self._host, _seconds_left(context))

    def ReassignPartitions(self, request: broker_pb2.ReassignPartitionsRequest, context: Any) -> Any:
        return reassignments.reassign_partitions(request, self._host, _seconds_left(context))

    def DeleteRecords(self, request: broker_pb2.DeleteRecordsRequest, context: Any) -> Any:
        return offsets.delete_records(request, self._host)

    def ListOffsets(self, request: broker_pb2.ListOffsetsRequest, context: Any) -> Any:
        if (named := len(request.partitions)) > FETCHED_PARTITIONS_MAX:
            raise too_many_partitions("listing", named, FETCHED_PARTITIONS_MAX)
        if request.max_wait_ms and self._listings_waiting.acquire(blocking=False):  # else it is answered at once
            try:
                wait_ms = min(request.max_wait_ms, self._settings.fetch_max_wait_ms)
                has_news = partial(offsets.has_news, request, self._host)
                self._wait(waits.hosted(request, self._host), has_news, wait_ms, context)
            finally:
                self._listings_waiting.release()
        return offsets.list_offsets(request, self._host, context.is_active)

    def InitProducer(self, request: broker_pb2.InitProducerRequest, context: Any) -> Any:
        return broker_pb2.InitProducerReply(producer_id=new_producer_id(), producer_epoch=0)

    def CommitOffsets(self, request: broker_pb2.CommitOffsetsRequest, context: Any) -> Any:
        return groups.commit_offsets(request, self._host, self._groups.states)

    def CommittedOffsets(self, request: broker_pb2.CommittedOffsetsRequest, context: Any) -> Any:
        return groups.committed_offsets(request, self._host)

    def ForgetOffsets(self, request: broker_pb2.ForgetOffsetsRequest, context: Any) -> Any:
        return groups.forget_offsets(request, self._host)

    def ListGroups(self, request: broker_pb2.ListGroupsRequest, context: Any) -> Any:
        return groups.list_groups(request, self._host)

    def DescribeGroup(self, request: broker_pb2.DescribeGroupRequest, context: Any) -> Any:
        return groups.describe_group(request, self._host, self._groups.states)

    def ResetOffsets(self, request: broker_pb2.ResetOffsetsRequest, context: Any) -> Any:
        return groups.reset_offsets(request, self._host, self._groups.states)

    def DeleteGroup(self, request: broker_pb2.DeleteGroupRequest, context: Any) -> Any:
        return groups.delete_group(request, self._host, self._groups.states)

    def KeepMember(self, request: broker_pb2.KeepMemberRequest, context: Any) -> Any:
        return members.keep_member(request, self._groups, self._host)

    def JoinGroup(self, request: broker_pb2.JoinGroupRequest, context: Any) -> Any:
        return members.join_group(request, self._groups)

    def RenewMember(self, request: broker_pb2.RenewMemberRequest, context: Any) -> Any:
        return members.renew_member(request, self._groups)

    def AwaitGroup(self, request: broker_pb2.AwaitGroupRequest, context: Any) -> Any:
        changed = threading.Event()
        context.add_callback(changed.set)
        deadline = self._clock.monotonic() + min(request.max_wait_ms, _GROUP_WAIT_MS_MAX) / 1000

        def is_waiting() -> bool:
            return self._clock.monotonic() < deadline and context.is_active() and not self._stopping.is_set()

        def wait(changed: threading.Event) -> bool:
            if is_waiting():  # looked at after `changed` was cleared: its end sets it again
                changed.wait(max(0.0, deadline - self._clock.monotonic()))
            return is_waiting()

        return members.await_group(request, self._groups, self._group_waits, wait, changed)

    def ClaimPartitions(self, request: broker_pb2.ClaimPartitionsRequest, context: Any) -> Any:
        return members.claim_partitions(request, self._groups)

    def ReleasePartitions(self, request: broker_pb2.ReleasePartitionsRequest, context: Any) -> Any:
        return members.release_partitions(request, self._groups, self._host)

    def LeaveGroup(self, request: broker_pb2.LeaveGroupRequest, context: Any) -> Any:
        return members.leave_group(request, self._groups)

    def DigestRange(self, request: broker_pb2.DigestRangeRequest, context: Any) -> Any:
        return verify.digest_range(request, self._host)

    def RepairPartition(self, request: broker_pb2.RepairPartitionRequest, context: Any) -> Any:
        return verify.repair_partition(request, self._host, self._scrubber, _seconds_left(context))

    def Prepare(self, request: transactions_pb2.PrepareRequest, context: Any) -> Any:
        return staging.prepare(request, self._host, self._staged_jobs, _seconds_left(context))

    def Apply(self, request: transactions_pb2.ApplyRequest, context: Any) -> Any:
        return staging.apply(request, self._host, self._staged_jobs, _seconds_left(context))

    def Renew(self, request: transactions_pb2.RenewRequest, context: Any) -> Any:
        return staging.renew(request, self._host)

    def ForgetStaged(self, request: transactions_pb2.ForgetStagedRequest, context: Any) -> Any:
        return staging.forget(request, self._host)

    def AbortStaged(self, request: transactions_pb2.AbortStagedRequest, context: Any) -> Any:
        return staging.abort(request, self._host)

    def ListStaged(self, request: transactions_pb2.ListStagedRequest, context: Any) -> Any:
        return staging.list_staged(request, self._host)

    def ReadDecisions(self, request: transactions_pb2.ReadDecisionsRequest, context: Any) -> Any:
        return decisions.read_decisions(request, self._host)

    def Decide(self, request: transactions_pb2.DecideRequest, context: Any) -> Any:
        return decisions.decide(request, self._host)

    def ListDecisions(self, request: transactions_pb2.ListDecisionsRequest, context: Any) -> Any:
        return decisions.list_decisions(request, self._host)

    def Append(self, request: broker_pb2.InlineAppendRequest, context: Any) -> Any:
        if len(request.body) > _INLINE_MAX:
            raise RequestTooLarge(size=len(request.body), setting="inline append limit", limit=_INLINE_MAX)
        if (named := len(request.request.partitions)) > WRITTEN_PARTITIONS_MAX:
            raise too_many_partitions("append", named, WRITTEN_PARTITIONS_MAX)
        if request.request.acks == append.ACKS_NONE:
            raise InvalidRequest(reason="acks=0 is not possible over gRPC, because every call is answered; use acks=1")
        call = append.Call(request.request, memoryview(bytearray(request.body)))
        append.append([call], self._host)
        self._wait(call.waiting_at(), call.is_acked, call.timeout_ms, context, is_cut_by_stop=False)
        return append.ack_reply(call)

    def Pull(self, request: pb.FetchRequest, context: Any) -> Any:
        limit = self._settings.pull_max_bytes
        if (named := len(request.partitions)) > FETCHED_PARTITIONS_MAX:
            raise too_many_partitions("fetch", named, FETCHED_PARTITIONS_MAX)
        answer = fetch.fetch(request, self._host, limit)
        if not answer.is_enough(request) and self._pulls_waiting.acquire(blocking=False):
            try:
                answer.close()
                wait_ms = min(request.max_wait_ms, self._settings.fetch_max_wait_ms)
                enough = partial(waits.enough, request, self._host, limit)
                found = self._wait(waits.hosted(request, self._host), enough, wait_ms, context)
                answer = found or fetch.fetch(request, self._host, limit)
            finally:
                self._pulls_waiting.release()
        try:
            self._reserve(answer.length, context)
            body = b"".join(piece.read() for piece in answer.slices)
        finally:
            answer.close()
        return broker_pb2.PullReply(reply=answer.reply, body=body)

    def _reserve(self, length: int, context: Any) -> None:
        """Take memory for an answer until it is sent, or the call has ended otherwise. Raises BrokerBusy."""
        granted = threading.Event()
        reservation = self._answers.reserve(min(length, _ANSWERS_MAX), granted.set)
        if not reservation.granted and self._pulls_waiting.acquire(blocking=False):
            try:
                granted.wait(_BUSY_SECONDS)
            finally:
                self._pulls_waiting.release()
        if not reservation.granted:
            reservation.release()
            reason = f"{_ANSWERS_MAX} bytes of gRPC answers are not sent yet; the data port has no such limit"
            raise BrokerBusy(broker=self._host.broker_id, reason=reason)
        if not context.add_callback(reservation.release):  # it has ended already
            reservation.release()

    def _wait(
        self,
        partitions: Sequence[Partition],
        look: Callable[[], _Found],
        timeout_ms: int,
        context: Any,
        *,
        is_cut_by_stop: bool = True,
    ) -> _Found:
        """Wait until a look finds something, the time is up, the client gives up or, in most cases, the broker stops.
        Returns the last look's result."""
        changed = threading.Event()
        context.add_callback(changed.set)  # the client has ended the call
        deadline = self._clock.monotonic() + timeout_ms / 1000

        def is_wanted() -> bool:
            return context.is_active() and not (is_cut_by_stop and self._stopping.is_set())

        return waits.wait_for(partitions, look, deadline, self._clock, changed, is_wanted)


def _seconds_left(context: Any) -> float:
    """The seconds until the client gives a call up; infinite if it has no deadline."""
    left = context.time_remaining()
    return math.inf if left is None else float(left)


def _abort(context: grpc.ServicerContext, error: KafkalogError) -> NoReturn:
    if isinstance(error, _INVALID):
        status = grpc.StatusCode.INVALID_ARGUMENT
    elif isinstance(error, _MISSING):
        status = grpc.StatusCode.NOT_FOUND
    elif isinstance(error, TopicExists):
        status = grpc.StatusCode.ALREADY_EXISTS
    elif error.retriable:
        status = grpc.StatusCode.UNAVAILABLE
    elif isinstance(error, InternalError):
        status = grpc.StatusCode.INTERNAL
    else:
        status = grpc.StatusCode.FAILED_PRECONDITION
    error = _brief(error)
    context.set_trailing_metadata(((ERROR_KEY, error_to_wire(error).SerializeToString()),))
    context.abort(status, str(error).encode()[:_SENTENCE_MAX].decode(errors="ignore"))
    raise AssertionError("abort raises")


def _brief(error: KafkalogError) -> KafkalogError:
    """The error with its long facts cut, if they are too long for a client's limit on metadata."""
    brief = error
    for limit in (1000, 100, 10):
        if error_to_wire(brief).ByteSize() <= _ERROR_MAX:
            break
        brief = error.fresh(**{name: _cut(fact, limit) for name, fact in error.facts.items()})
    return brief


def _cut(fact: Any, limit: int) -> Any:
    if not isinstance(fact, str) or len(fact) <= limit:
        return fact
    return f"{fact[:limit]}... ({len(fact)} characters)"


class _Receiving(grpc.ServerInterceptor):
    """Lets every method receive its message itself, in its lane, where the wait for it can be ended.

    gRPC would wait for the message of a unary call before it calls the method; meanwhile a thread is occupied, and the
    wait cannot be ended. So each method is served as one that takes a stream of messages; on the wire both are the
    same.
    """

    def __init__(self, broker_id: int, lanes: Lanes) -> None:
        self._broker_id = broker_id
        self._lanes = lanes
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}  # by full name, of methods that there are

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        known = self._handlers.get(details.method)
        if known is None and (handler := continuation(details)) is not None:
            known = self._handlers[details.method] = self._receiving(details.method, handler)
        return known

    def _receiving(self, full_name: str, handler: Any) -> Any:
        service, _, name = full_name.strip("/").rpartition("/")
        lane = self._lanes.of(name)[1] if service == SERVICE else self._lanes.default
        method = handler.unary_unary or handler.unary_stream or handler.stream_stream

        def answer(messages: Iterator[bytes], context: Any, *send: Any) -> Any:
            if is_refusing():
                reason = f"{QUEUED_MAX} calls of the lane of {name} are queued, or no thread can be started for them"
                _abort(context, BrokerBusy(broker=self._broker_id, reason=reason))
            requests = self._requests(name, lane, handler.request_deserializer, messages, context)
            if handler.request_streaming:
                return method(requests, context, *send)
            request = next(requests, None)
            if request is None:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} requires exactly one request message")
            return method(request, context, *send)

        answer.experimental_thread_pool = lane  # type: ignore[attr-defined]
        answer.experimental_non_blocking = getattr(method, "experimental_non_blocking", False)  # type: ignore[attr-defined]
        as_stream = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return as_stream(answer, None, handler.response_serializer)

    def _requests(
        self, name: str, lane: Lane, parsed: Callable[[bytes], Message], messages: Iterator[bytes], context: Any
    ) -> Iterator[Message]:
        while True:
            try:
                message = lane.next_message(messages, context)
                if message is None:
                    return
                request = parsed(message)
            except DecodeError:
                _abort(context, InvalidRequest(reason=f"the message is not a request of {name}"))
            except MessageOverdue:
                context.abort(grpc.StatusCode.CANCELLED, "the message came too late")
            yield request


class RpcServer:
    """The gRPC server. `bind` first, so that a port in use is known before anything is opened."""

    def __init__(self, host: str, port: int, broker_id: int) -> None:
        check_port_free(host, port, "grpc.port")  # gRPC would print a line of its own, without the reason
        self._broker_id = broker_id
        self._stopping = False
        self._lanes = Lanes()
        self._server = grpc.server(
            self._lanes.default,
            interceptors=[_Receiving(broker_id, self._lanes)],
            maximum_concurrent_rpcs=_CALLS_MAX,
            options=(
                ("grpc.so_reuseport", 0),  # else a second broker could share the port unnoticed
                ("grpc.max_receive_message_length", _MESSAGE_MAX),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", 64 << 10),
                ("grpc.http2.bdp_probe", 0),  # else it receives whole messages that no thread has requested
                # Ends the calls and the connection of a machine that has vanished.
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
                ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.max_ping_strikes", 0),  # clients ping every 2 s while they wait
            ),
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError:
            self.port = 0
        if not self.port:
            self._lanes.shut_down()
            raise AddressInUse(address=f"{host}:{port}", setting="grpc.port")
        self._health = health.HealthServicer()
        self._service: BrokerService | None = None

    def start(self, service: BrokerService) -> None:
        """Serve, and report it to health checks."""
        self._service = service
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._answering(name, service), method.request.FromString, method.reply.SerializeToString
            )
            for name, method in METHODS.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        for name in (SERVICE, ""):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._server.start()

    def tell_unhealthy(self) -> None:
        """Report to health checks that this broker does not serve; it still answers."""
        for name in (SERVICE, ""):
            self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)

    def _answering(self, name: str, service: BrokerService) -> _Method:
        """The function for a method, called in a thread of its lane unless the client has given up. An error becomes a
        status, with the error in its metadata."""
        method = service.method(name, self._lanes.of(name)[0])

        def answer(request: Message, context: grpc.ServicerContext) -> Message:
            try:
                if self._stopping:
                    raise BrokerStopping(broker_id=self._broker_id)
                return method(request, context)
            except KafkalogError as error:
                _abort(context, error)
            except Exception as error:  # a defect: returned to the client, and logged with its traceback
                log.exception("request_failed", method=name)
                _abort(context, InternalError.of(error))

        return answer

    def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, finish those that run. Safe to call before `start`."""
        self._stopping = True
        self._health.enter_graceful_shutdown()
        if self._service is not None:
            self._service.stop_waiting()
        self._server.stop(grace_seconds).wait()
        self._lanes.shut_down()
