"""Fetches, top to bottom: find each partition's slice of its log file and describe it. The same for both ports.

Nothing waits and no record is read here: `fetch` returns what is there now, as slices that hold their files open until
they are sent. The port decides by `Answer.is_enough` whether to wait for more (`waits.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from broker.replica.host import Host
from broker.storage.segment import FileSlice, Hint
from kafkalog.errors import InvalidRequest, KafkalogError
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_to_wire

BODY_MAX = (1 << 32) - 1  # of a frame
_SLICES_MAX = 500
"""Of one answer, for each may hold a file open. A follower gets the partitions after them in the next answer. In a
fetch they get empty answers, as they do when the bytes are used up; a consumer asks first for those it has least of."""


class MemorySlice:
    """Bytes that are not in a file; see `FileSlice`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.length = len(data)

    def read(self) -> bytes:
        return self._data

    def close(self) -> None:
        """Nothing is held open."""


ReplyT = TypeVar("ReplyT")


@dataclass(slots=True)
class Answer(Generic[ReplyT]):
    """The answer to a fetch at this moment.

    Attributes:
        reply: to be sent first.
        slices: its body, in order; `close` lets their files go.
        length: bytes in the slices.
        failed: some partition has an error, which is returned at once.
    """

    reply: ReplyT
    slices: list[FileSlice | MemorySlice] = field(default_factory=list)
    length: int = 0
    failed: bool = False

    @property
    def is_full(self) -> bool:
        """Whether no slice may be added."""
        return len(self.slices) >= _SLICES_MAX

    def is_enough(self, request: pb.FetchRequest) -> bool:
        return self.failed or self.is_full or self.length >= request.min_bytes

    def close(self) -> None:
        for piece in self.slices:
            piece.close()
        self.slices.clear()


def fetch(request: pb.FetchRequest, host: Host, max_bytes: int) -> Answer[pb.FetchReply]:
    """What there is for a fetch right now.

    Args:
        max_bytes: the broker's limit of one answer; the request may ask for less. The first partition with data gives a
            whole batch whatever the limits are, so that a reader always makes progress.
    """
    answer = Answer(pb.FetchReply())
    left = min(request.max_bytes or max_bytes, max_bytes, BODY_MAX)
    try:
        for part in request.partitions:
            left -= _add_slice(part, host, left, answer, request.for_repair)
    except BaseException:
        answer.close()
        raise
    if not request.partitions:
        raise InvalidRequest(reason="a fetch names no partition")
    return answer


def _add_slice(part: pb.FetchPartition, host: Host, left: int, answer: Answer[pb.FetchReply], for_repair: bool) -> int:
    """Add one partition to an answer; returns its bytes."""
    fetched = answer.reply.partitions.add()
    length = 0
    try:
        partition = (host.replica_of if for_repair else host.leader_of)(part.topic_id, part.partition)
        if part.HasField("leader_epoch"):
            last_epoch = part.last_epoch if part.HasField("last_epoch") else None
            partition.check_reader(part.leader_epoch, part.offset, last_epoch)
        hint = Hint(part.hint.segment_base_offset, part.hint.position) if part.HasField("hint") else None
        wanted = min(part.max_bytes or left, left)
        if wanted > 0 and not answer.is_full:  # some of the limit is left
            piece = (partition.read_as_replica if for_repair else partition.read)(part.offset, wanted, hint)
            if piece.length and (not answer.length or piece.length <= left):
                answer.slices.append(piece)
                length = fetched.length = piece.length
                answer.length += length
                fetched.slice.segment_base_offset = piece.segment_base_offset
                fetched.slice.position = piece.position
            else:
                piece.close()
        fetched.log_start_offset = partition.start_offset
        fetched.end_offset = partition.readable_end_offset
    except KafkalogError as error:
        fetched.Clear()
        fetched.error.CopyFrom(error_to_wire(error))
        answer.failed = True
    return length
