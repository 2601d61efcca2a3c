"""What the followers on one broker fetch from the leaders here: a session for each connection. Its requests name only
positions that are new; appends mark partitions as having news, so that idle ones cost nothing.

A partition with news is answered once; then nothing of it is sent until a request names it again. A moved high
watermark alone is no news: it goes with the next data, or when the follower's wait is over.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial

from broker.replica.fetcher import FILES_NAMED_MAX
from broker.replica.host import Host
from broker.replica.leadership import IN_FLIGHT_MAX, Pulse
from broker.replica.partition import Partition
from broker.requests.fetch import BODY_MAX, Answer, MemorySlice
from broker.staging.copies import StagedCopy
from broker.storage.segment import Hint
from kafkalog.clock import Clock
from kafkalog.errors import KafkalogError, OffsetOutOfRange
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_to_wire

_PIECES_A_SECOND = 10
_PIECE_BYTES_MIN = 64 << 10
"""Of the pieces of copies that are held to a rate, all of a connection together: so many in a second, unless they would
be smaller than this each."""
_Key = tuple[bytes, int]


class _Position:
    """Where a follower's log ends.

    Attributes:
        needs_producers: the follower lacks the state of the producers before its log.
        diverges: what the leader answers if the logs do not agree.
        watermark, start_offset: what the follower was last told of them.
        wake: registered at the partition.
    """

    __slots__ = (
        "diverges",
        "epoch",
        "hint",
        "needs_producers",
        "offset",
        "partition",
        "staged",
        "start_offset",
        "wake",
        "watermark",
    )

    def __init__(
        self,
        partition: Partition,
        offset: int,
        epoch: int,
        hint: Hint | None,
        needs_producers: bool,
        staged: list[StagedCopy],
        wake: Callable[[], None],
    ) -> None:
        self.partition = partition
        self.offset = offset
        self.epoch = epoch
        self.hint = hint
        self.needs_producers = needs_producers
        self.staged = staged
        self.diverges: tuple[int, int] | None = None
        self.watermark = self.start_offset = -1
        self.wake = wake


class ReplicaSession:
    """The followers of a connection. Not thread-safe, except that appends mark partitions.

    Args:
        number: of the connection; one that was accepted later has a larger number.
        wake: called when there may be news.
    """

    def __init__(self, host: Host, clock: Clock, number: int, wake: Callable[[], None]) -> None:
        self._host = host
        self._clock = clock
        self._wake = wake
        self._pulse = Pulse(clock.monotonic(), -1, number)
        self._broker_id = -1
        self._positions: dict[_Key, _Position] = {}
        self._throttled: set[_Key] = set()  # whose copies were held to a rate when they were looked at last
        self._failed: dict[_Key, tuple[int, KafkalogError]] = {}  # of the last request, with the leader epochs in it
        self._dirty: dict[_Key, None] = {}  # in order; others add to it
        self._unsettled: dict[_Key, None] = {}  # whose followers may not know the high watermark
        self._files_named = 0  # in the answer that is being made
        self._answered_at = deque([-math.inf] * IN_FLIGHT_MAX, IN_FLIGHT_MAX)  # the last answers

    def take(self, request: pb.ReplicaFetchRequest) -> None:
        """Note the positions that a request names."""
        # First: a log that was lost is left, and the registration that follows is not that of what was lost.
        for named in request.partitions:
            if named.leaves:
                self._leave((named.topic_id, named.partition), request)
        self._pulse.at, self._pulse.registration = self._clock.monotonic(), request.registration
        self._pulse.proven_at = self._answered_at[0]
        self._broker_id = request.broker_id
        for named in request.partitions:
            if named.leaves:
                continue
            key = named.topic_id, named.partition
            self._forget(key)
            try:
                replica = self._host.replica_of(*key)
                position = self._positions[key] = _Position(
                    replica,
                    named.end_offset,
                    named.leader_epoch,
                    Hint(named.hint.segment_base_offset, named.hint.position) if named.HasField("hint") else None,
                    named.needs_producers,
                    [StagedCopy(each.number, each.salt, each.size, each.part) for each in named.staged],
                    partial(self._mark, key),
                )
                position.diverges = replica.role.fetched(
                    request.broker_id,
                    request.directory,
                    self._pulse,
                    named.leader_epoch,
                    named.end_offset,
                    named.last_epoch,
                    not named.has_damage and not named.needs_producers,
                    position.staged,
                )
                self._dirty[key] = self._unsettled[key] = None
                if named.is_damaged:
                    replica.met_damage(named.end_offset)
            except KafkalogError as error:
                self._failed[key] = named.leader_epoch, error

    def _leave(self, key: _Key, request: pb.ReplicaFetchRequest) -> None:
        self._forget(key)
        self._throttled.discard(key)
        partition = self._host.hosted.get(key)  # also if its position is not known now, because it was answered
        if partition is not None:
            partition.role.left(request.broker_id, request.directory, self._pulse.connection)

    def _mark(self, key: _Key) -> None:
        """There are news of a partition; called by any thread."""
        self._dirty[key] = None
        self._wake()

    def _forget(self, key: _Key) -> None:
        position = self._positions.pop(key, None)
        if position is not None:
            position.partition.replica_waiters.unregister(position.wake)
        self._dirty.pop(key, None)
        self._unsettled.pop(key, None)

    def answer(self, max_bytes: int, is_urgent: bool) -> Answer[pb.ReplicaFetchReply] | None:
        """What is new; None: nothing is, and the answer can wait.

        Args:
            is_urgent: the answer is due, whatever there is.
        """
        answer = Answer(pb.ReplicaFetchReply())
        try:
            self._add_failures(answer)
            left = min(max_bytes, BODY_MAX)
            self._files_named = 0
            for key in list(self._dirty):
                if self._files_named > FILES_NAMED_MAX or (answer.slices and (left <= 0 or answer.is_full)):
                    break
                del self._dirty[key]  # first: what comes from here on marks it again
                left -= self._look(key, left, answer)
                if key in self._dirty and answer.slices:
                    break  # it did not fit: nor may the others, whose pieces would be made in vain
            if not answer.reply.partitions and not is_urgent:
                return None
            for key in list(self._unsettled):
                self._tell_watermark(key, answer)
            self._answered_at.append(self._clock.monotonic())
            return answer
        except BaseException:
            answer.close()
            raise

    def _add_failures(self, answer: Answer[pb.ReplicaFetchReply]) -> None:
        failed, self._failed = self._failed, {}
        for key, (epoch, error) in failed.items():
            self._add_failure(key, epoch, error, answer)

    def _add_failure(self, key: _Key, epoch: int, error: KafkalogError, answer: Answer[pb.ReplicaFetchReply]) -> None:
        copy_offset = None
        if isinstance(error, OffsetOutOfRange):
            try:
                copy_offset = self._host.replica_of(*key).copy_offset
            except KafkalogError as later:
                error = later
        news = answer.reply.partitions.add(
            topic_id=key[0], partition=key[1], leader_epoch=epoch, copy_offset=copy_offset
        )
        news.error.CopyFrom(error_to_wire(error))

    def _look(self, key: _Key, left: int, answer: Answer[pb.ReplicaFetchReply]) -> int:
        """Add what is new of a partition; returns its bytes."""
        position = self._positions.get(key)
        if position is None:
            return 0
        replica = position.partition
        try:
            if position.diverges is not None:
                copy_offset = replica.copy_offset
                news = self._news(key, position, answer)
                news.copy_offset = copy_offset
                news.diverges, (news.agreed_epoch, news.agreed_end_offset) = True, position.diverges
                self._forget(key)  # until it is named again
                return 0
            replica.replica_waiters.register(position.wake)
            replica.role.check_leads(position.epoch)
            if position.needs_producers:
                return self._add_producers(key, position, left, answer)
            rate = replica.role.throttled_rate(self._broker_id)
            most = self._piece_max(key, rate, left)
            piece = replica.read_as_replica(position.offset, max(most, 1), position.hint)
            if answer.length and piece.length > left:
                piece.close()
                self._dirty[key] = None
                return 0
            files, lacking = replica.staged.news(position.staged, most - piece.length)
            if not piece.length and not lacking and files is None:
                piece.close()
                if replica.start_offset > position.start_offset >= 0:  # records were deleted
                    self._news(key, position, answer)
                return 0
            news = self._news(key, position, answer)
            news.is_throttled = rate > 0
            if piece.length:
                answer.slices.append(piece)
                news.length = piece.length
                news.slice.segment_base_offset, news.slice.position = piece.segment_base_offset, piece.position
            if files is not None:
                news.names_staged = True
                news.staged.extend(pb.StagedFile(**each._asdict()) for each in files)
                self._files_named += len(files)
            self._files_named += len(lacking)
            for each, found in lacking:
                answer.slices.append(found)
                news.pieces.add(
                    number=each.file.number,
                    position=each.position,
                    length=each.length,
                    part=each.file.part,
                    salt=each.file.salt if each.file.part else 0,
                )
            length = piece.length + sum(each.length for each, _ in lacking)
            answer.length += length
            self._forget(key)
            return length
        except KafkalogError as error:
            self._forget(key)
            self._add_failure(key, position.epoch, error, answer)
            return 0

    def _add_producers(self, key: _Key, position: _Position, left: int, answer: Answer[pb.ReplicaFetchReply]) -> int:
        """Add the state of the producers before a follower's log, which it needs first; returns its bytes."""
        piece = MemorySlice(position.partition.producers_before(position.offset))
        position.partition.role.check_leads(position.epoch)  # all of it is of this epoch
        if answer.length and piece.length > left:
            self._dirty[key] = None
            return 0
        self._news(key, position, answer).producers_length = piece.length
        answer.slices.append(piece)
        answer.length += piece.length
        self._forget(key)
        return piece.length

    def _piece_max(self, key: _Key, rate: int, left: int) -> int:
        """The bytes that a partition may add to an answer in which there is room for `left`."""
        if not rate:
            self._throttled.discard(key)
            return left
        self._throttled.add(key)
        return min(left, max(rate // _PIECES_A_SECOND // len(self._throttled), _PIECE_BYTES_MIN))

    def _news(self, key: _Key, position: _Position, answer: Answer[pb.ReplicaFetchReply]) -> pb.ReplicaNews:
        news = answer.reply.partitions.add(topic_id=key[0], partition=key[1], leader_epoch=position.epoch)
        news.high_watermark = position.watermark = position.partition.role.high_watermark
        news.log_start_offset = position.start_offset = position.partition.start_offset
        return news

    def _tell_watermark(self, key: _Key, answer: Answer[pb.ReplicaFetchReply]) -> None:
        """Add the high watermark and the start of a log, if the follower does not know them."""
        position = self._positions[key]
        replica = position.partition
        if replica.role.epoch == position.epoch and position.diverges is None:
            if (replica.role.high_watermark, replica.start_offset) != (position.watermark, position.start_offset):
                self._news(key, position, answer)
            if position.watermark >= position.offset:
                del self._unsettled[key]

    def close(self) -> None:
        self._pulse.is_open = False
        for key in list(self._positions):
            self._forget(key)
