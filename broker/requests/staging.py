"""Staged writes, top to bottom: stage, renew, prepare, apply, forget, abort, list. Knows nothing of who decides.

Every request except Renew and ListStaged names partitions led here. Each partition succeeds or fails on its own; its
error is at its place in the reply. If several partitions are to be synced, all syncs are requested before the first is
waited for, so that the directory's threads work in parallel. A prepare or an apply of gigabytes takes minutes: it runs
as a job (`broker/replica/jobs.py`), and its request is answered within `TURN_SECONDS`, done or with its progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from broker.replica.ack import Ack
from broker.replica.applier import Applied
from broker.replica.host import Host
from broker.replica.jobs import Job, StagedJobs
from broker.replica.partition import Partition
from broker.requests.append import ack_timeout_ms, checked
from broker.requests.waits import wait_for
from broker.staging.format import PartSpec, PreparedSet
from kafkalog.errors import InternalError, InvalidRequest, KafkalogError, RequestTimedOut
from kafkalog.events import get_logger
from kafkalog.format.batch import Batch
from kafkalog.format.decisions import UUID_SIZE, check_transactional_id
from kafkalog.format.producer_ids import producer_id_of
from kafkalog.wire import dataport_pb2 as data_pb
from kafkalog.wire import transactions_pb2 as pb
from kafkalog.wire.frames import error_to_wire

log = get_logger(__name__)

TURN_SECONDS = 2.0
"""How long a Prepare or Apply is worked at before it is answered as unfinished."""

_AT_ONCE_BYTES = 8 << 20
"""What takes no longer than a turn on any disk is done in the request's own thread: other threads cost a small commit
more than its work does."""

_RENEW_WITHIN_MS_MAX = 86_400_000  # it travels as 32 bits
_RENEWALS = 4
"""Of a task within the retention of what is staged: some of them may be lost."""


class StageCall:
    """A checked stage request; `write` stores its batches."""

    def __init__(self, request: data_pb.StageRequest, body: memoryview, host: Host) -> None:
        """Raises InvalidRequest: the body is not what the partitions say."""
        total = sum(part.length for part in request.partitions)
        if total != len(body) or not request.partitions:
            raise InvalidRequest(
                reason=f"a stage request's partitions have {total} bytes, but its body has {len(body)}"
            )
        self._reply = data_pb.StageReply()
        self._waits_for: list[tuple[data_pb.StagedPartition, Ack]] = []
        self.timeout_ms = ack_timeout_ms(request.timeout_ms)
        self._checked: list[tuple[data_pb.StagedPartition, Partition, bytes, list[Batch]]] = []
        start = 0
        for wanted in request.partitions:
            data = body[start : start + wanted.length]
            start += wanted.length
            staged = self._reply.partitions.add()
            with _errors_in(staged):
                _check_uuid(wanted.uuid, "part")
                partition = host.leader_of(wanted.topic_id, wanted.partition)
                self._checked.append((staged, partition, wanted.uuid, checked(data, partition, staged=True)))

    def write(self) -> data_pb.StageReply:
        """Keep the batches beside their logs. The answer, once it `is_acked`, means that the operating systems of the
        in-sync set have them."""
        for staged, partition, uuid, batches in self._checked:
            with _errors_in(staged):
                staged.batches, staged.length, ack = partition.staged.stage(uuid, batches)
                if ack is not None:
                    self._waits_for.append((staged, ack))
        self._checked.clear()
        return self._reply

    def is_acked(self) -> bool:
        """Whether the in-sync sets have all that was written, or it cannot be known any more; a partition then has that
        error."""
        for staged, ack in list(self._waits_for):
            try:
                if not ack.is_kept():
                    return False
            except KafkalogError as error:
                staged.Clear()
                staged.error.CopyFrom(error_to_wire(error))
            self._waits_for.remove((staged, ack))
        return True

    def waiting_at(self) -> list[Partition]:
        """The partitions whose followers are waited for."""
        return [ack.partition for _, ack in self._waits_for]

    def give_up(self) -> None:
        """The time for the ack is over."""
        for staged, ack in self._waits_for:
            what = f"the in-sync replicas' copy of what is staged for {ack.partition.label}"
            staged.Clear()
            staged.error.CopyFrom(
                error_to_wire(RequestTimedOut(what=what, address="the other brokers", timeout_ms=self.timeout_ms))
            )
        self._waits_for.clear()


def renew(request: pb.RenewRequest, host: Host) -> pb.RenewReply:
    """Keep all staged parts of a write on this broker, because one of its tasks runs."""
    write = request.family, request.batch_id
    for partition in list(host.hosted.values()):
        try:
            partition.staged.renew(write)
        except KafkalogError as error:
            log.info("staged_hint_ignored", partition=partition.label, reason=str(error))
    return pb.RenewReply(renew_within_ms=_renew_within_ms(host))


def _renew_within_ms(host: Host) -> int:
    """The time within which tasks have to renew their staged parts."""
    retention_ms = host.settings.transaction_staged_retention_ms
    return min(max(retention_ms // _RENEWALS, 1), _RENEW_WITHIN_MS_MAX)


def prepare(request: pb.PrepareRequest, host: Host, jobs: StagedJobs, seconds: float) -> pb.PrepareReply:
    """Keep parts until their batch is decided. The answer means that they are undamaged and durable, except in
    partitions that it reports as unfinished.

    Args:
        seconds: until the client gives the request up.

    Raises:
        InvalidRequest.
    """
    _check_transaction(request)
    reply = pb.PrepareReply()
    prepared: list[tuple[pb.PreparedPartition, Partition, Ack | None, Job]] = []
    at_once: list[tuple[pb.PreparedPartition, Partition, Ack | None]] = []
    left = _AT_ONCE_BYTES
    for wanted in request.partitions:
        answer = reply.partitions.add()
        with _errors_in(answer):
            partition = host.leader_of(wanted.topic_id, wanted.partition)
            ack = partition.staged.prepare(_set_of(request, wanted))
            left -= max(partition.staged.unsynced_bytes, partition.staged.prepared_bytes(request.commit_uuid))
            if left >= 0 and not jobs.syncs.is_busy(partition):
                at_once.append((answer, partition, ack))
                continue
            key = request.commit_uuid, request.version
            job = jobs.syncs.ask(partition, key, partial(partition.staged.keep_prepared, request.commit_uuid))
            prepared.append((answer, partition, ack, job))
    deadline = _turn_end(host, seconds)
    for answer, partition, ack in at_once:
        with _errors_in(answer):
            partition.staged.keep_prepared(request.commit_uuid)
            answer.unfinished = not _is_acked(ack, deadline, host)
        _say_progress(answer, partition)
    for answer, partition, ack, job in prepared:
        with _errors_in(answer):
            if job.wait(deadline - host.clock.monotonic()):
                job.result()
                answer.unfinished = not _is_acked(ack, deadline, host)
            else:
                answer.unfinished = True
        _say_progress_of(job, answer, partition, host)
    return reply


def apply(request: pb.ApplyRequest, host: Host, jobs: StagedJobs, seconds: float) -> pb.ApplyReply:
    """Append a decided batch. The answer means that all of it is in the logs and durable, except in partitions that it
    reports as unfinished.

    Args:
        seconds: until the client gives the request up.

    Raises:
        InvalidRequest.
    """
    _check_transaction(request)
    reply = pb.ApplyReply()
    batch = request.transactional_id, request.producer_id, request.batch_id, request.commit_uuid
    small: list[tuple[pb.AppliedPartition, Partition]] = []
    applying: list[tuple[pb.AppliedPartition, Partition, Job]] = []
    at_once: list[tuple[pb.AppliedPartition, Partition, Applied]] = []

    def ask(answer: pb.AppliedPartition, partition: Partition) -> None:
        job = jobs.applies.ask(partition, request.commit_uuid, partial(partition.staged.apply, *batch))
        applying.append((answer, partition, job))

    left = _AT_ONCE_BYTES
    for wanted in request.partitions:
        answer = reply.partitions.add()
        with _errors_in(answer):
            partition = host.leader_of(wanted.topic_id, wanted.partition)
            left -= partition.staged.prepared_bytes(request.commit_uuid)
            if left >= 0:
                small.append((answer, partition))
            else:
                ask(answer, partition)
    deadline = _turn_end(host, seconds)
    for answer, partition in small:
        with _errors_in(answer):
            applied = partition.staged.try_apply(*batch)
            if applied is None:  # a job is at work there
                ask(answer, partition)
            else:
                at_once.append((answer, partition, applied))
        _say_progress(answer, partition)
    for answer, partition, applied in at_once:
        with _errors_in(answer):
            partition.staged.finish_apply(applied)
            answer.end_offset = applied.end_offset
            answer.unfinished = not _is_acked(partition.staged.ack_of_apply(applied), deadline, host)
        _say_progress(answer, partition)
    for answer, partition, job in applying:
        with _errors_in(answer):
            done: Applied | None = job.result() if job.wait(deadline - host.clock.monotonic()) else None
            if done is None or not wait_for(
                [partition], partial(partition.is_flushed_to, done.sync_to), deadline, host.clock
            ):
                answer.unfinished = True
            else:
                partition.staged.finish_apply(done)
                answer.end_offset = done.end_offset
                answer.unfinished = not _is_acked(partition.staged.ack_of_apply(done), deadline, host)
        _say_progress_of(job, answer, partition, host)
    return reply


def _is_acked(ack: Ack | None, deadline: float, host: Host) -> bool:
    """Whether the in-sync set has what an ack promises; waits for it until a time. Raises as `Ack.is_kept`."""
    return ack is None or wait_for([ack.partition], ack.is_kept, deadline, host.clock)


def _turn_end(host: Host, seconds: float) -> float:
    return host.clock.monotonic() + min(TURN_SECONDS, seconds / 2)


def _say_progress(answer: Any, partition: Partition) -> None:
    """Set the progress in an answer that is unfinished or failed: the partition's."""
    if answer.unfinished or answer.HasField("error"):
        answer.progress = partition.staged.work


def _say_progress_of(job: Job, answer: Any, partition: Partition, host: Host) -> None:
    """The same for a job. A job that has not begun waits for other jobs, so its progress is that of all staged writes
    on this broker. That is another measure than the partition's, and the answer states which it is."""
    if job.begun:
        _say_progress(answer, partition)
    elif answer.unfinished:
        answer.queued = True
        answer.progress = sum(each.staged.work for each in list(host.hosted.values()))


def forget(request: pb.ForgetStagedRequest, host: Host) -> pb.ForgetStagedReply:
    """Forget a transaction's staged data up to a batch that is done, or a set that cannot be decided any more. In-doubt
    recovery does later what fails here."""
    if request.commit_uuid:
        _check_uuid(request.commit_uuid, "commit")
        _for_each(
            request.partitions,
            host,
            lambda partition, _: partition.staged.drop(request.commit_uuid, request.below_version, wait=False),
        )
        return pb.ForgetStagedReply()
    _for_each(request.partitions, host, lambda partition, _: partition.staged.forget(*_finished(request)))
    return pb.ForgetStagedReply()


def _finished(request: pb.ForgetStagedRequest) -> tuple[str, int, bool]:
    return request.transactional_id, request.batch_id, request.stays


def abort(request: pb.AbortStagedRequest, host: Host) -> pb.AbortStagedReply:
    """Forget parts that are not prepared. Parts for which this fails expire later."""
    _for_each(request.partitions, host, lambda partition, wanted: partition.staged.abort(wanted.uuids))
    return pb.AbortStagedReply()


def list_staged(request: pb.ListStagedRequest, host: Host) -> pb.ListStagedReply:
    """What is staged on this broker, of all transactions or of one."""
    wanted = producer_id_of(request.transactional_id) if request.transactional_id else None
    reply = pb.ListStagedReply()
    for partition in host.hosted.values():
        for staged in partition.staged.all():
            if wanted is not None and staged.producer_id != wanted:
                continue
            added = reply.sets.add(
                topic_id=partition.topic_id,
                partition=partition.number,
                topic=partition.topic,
                transactional_id=request.transactional_id,
                producer_id=staged.producer_id,
                batch_id=staged.batch_id,
                version=-1,
                parts=staged.parts,
                length=staged.length,
                staged_us=staged.staged_us,
                is_copy=not partition.role.leads,
            )
            if staged.prepared is not None:
                added.transactional_id = staged.prepared.transactional_id
                added.commit_uuid, added.version = staged.prepared.commit_uuid, staged.prepared.version
    return reply


def staged_bytes(host: Host) -> int:
    """The size of the files of staged data on this broker's disk."""
    return sum(partition.staged.size_bytes for partition in host.hosted.values())


def _check_transaction(request: pb.PrepareRequest | pb.ApplyRequest) -> None:
    _check_uuid(request.commit_uuid, "commit")
    check_transactional_id(request.transactional_id)
    if request.producer_id != producer_id_of(request.transactional_id):
        raise InvalidRequest(reason=f"producer id {request.producer_id} is not that of '{request.transactional_id}'")
    if request.batch_id < 0:
        raise InvalidRequest(reason=f"batch_id must be >= 0, got {request.batch_id}")


def _check_uuid(uuid: bytes, what: str) -> None:
    if len(uuid) != UUID_SIZE:
        raise InvalidRequest(reason=f"the uuid of a {what} must have {UUID_SIZE} bytes, not {len(uuid)}")


def _set_of(request: pb.PrepareRequest, wanted: pb.PreparePartition) -> PreparedSet:
    parts = tuple(PartSpec(part.uuid, part.part, part.batches, part.length) for part in wanted.parts)
    for part in parts:
        _check_uuid(part.uuid, "part")
    if not parts or any(before.part >= after.part for before, after in zip(parts, parts[1:], strict=False)):
        raise InvalidRequest(reason=f"the parts of partition {wanted.partition} must be in ascending order, each once")
    return PreparedSet(
        request.transactional_id, request.producer_id, request.batch_id, request.commit_uuid, request.version, parts
    )


@contextmanager
def _errors_in(answer: Any) -> Iterator[None]:
    """Converts an exception of the block to the answer's error; a defect of the broker becomes InternalError and is
    logged."""
    try:
        yield
    except KafkalogError as error:
        caught = error
    except Exception as error:
        log.exception("staged_write_failed")
        caught = InternalError.of(error)
    else:
        return
    answer.Clear()
    answer.error.CopyFrom(error_to_wire(caught))


def _for_each(wanted: Iterable[Any], host: Host, hint: Callable[[Partition, Any], object]) -> None:
    for each in wanted:
        try:
            hint(host.leader_of(each.topic_id, each.partition), each)
        except KafkalogError as error:
            log.info("staged_hint_ignored", partition=each.partition, reason=str(error))
