"""The format of a file of staged data, and its reading at a start. Pure: reads through a function that is passed in.

Layout, little-endian. A file begins with 16 bytes; then frames follow, each at a multiple of 8:

    4s "KLSG", u32 version 1, u64 salt

    at  size  field
     0  4s    magic       "KLSF"
     4  u8    kind        1 batch, 2 prepared, 3 dropped
     5  3     zero
     8  u32   length      of what follows the frame, a multiple of 8
    12  u32   number      of a batch within its part; else 0
    16  16s   uuid        of the part (batch) or of the commit (prepared, dropped)
    32  i64   staged_us   when it came
    40  u32   crc         batch: the `crc` of its header; prepared: CRC-32C of what follows; else 0
    44  u32   frame_crc   CRC-32C of the salt and bytes 0 to 44

A batch frame is followed by one record batch, as its producer made it. A prepared frame is followed by a set: the parts
of one partition that are to be appended together, in this order, once their transaction's batch is decided:

    i64 producer_id, i64 batch_id, i32 version, u32 part_count, u32 id_length
    for each part:  16s uuid, u32 part, u32 batches, u64 length
    transactional id, UTF-8, padded with zeros to a multiple of 8

A part of which much has come gets files of its own, `%020d-<uuid>-<salt>.part`. They have nothing but its next record
batches, one after the other, so that such a file can become a segment of the log as it is. What the leader of a log
stamps into a header is not part of what was staged: a stop while a file is stamped leaves it stamped in part. A batch
is known by the checksum of what follows.

The salt is random and unknown to clients, so a record's bytes cannot pass for a frame. After damage, frames are
searched at every step of 8 bytes, so damage costs only the frames in which it lies. After a start a file is not
appended to: an incomplete frame at its end stays and is ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fastcrc.crc32 import iscsi as crc32c

from kafkalog.errors import CorruptBatch
from kafkalog.format.batch import HEADER, HEADER_SIZE, BatchHeader, body_fault, header_at, read_header

Read = Callable[[int, int], "bytes | memoryview"]
"""(position, length) -> that many bytes; fewer only at the end of the file."""

FILE_START = struct.Struct("<4sIQ")
FRAME = struct.Struct("<4sB3xII16sqII")
_FRAME_CHECKED = struct.Struct("<4sB3xII16sqI")
_CRC = struct.Struct("<I")
_SET = struct.Struct("<qqiII")
_PART = struct.Struct("<16sIIQ")
assert (FILE_START.size, FRAME.size, _FRAME_CHECKED.size, _SET.size, _PART.size) == (16, 48, 44, 28, 32)
FRAME_SIZE = FRAME.size
_FILE_MAGIC, _VERSION = b"KLSG", 1
_MAGIC = b"KLSF"
_ALIGNMENT = 8
_WINDOW = 1 << 20

BATCH, PREPARED, DROPPED = 1, 2, 3


class PartSpec(NamedTuple):
    """A part as its writer knows it: how many record batches, and how many bytes they have."""

    uuid: bytes
    part: int
    batches: int
    length: int


class PreparedSet(NamedTuple):
    """The parts of a transaction's batch that belong into one partition, in order.

    `version`: of the decision's znode as the coordinator read it. `commit_uuid`: of its attempt to commit.
    """

    transactional_id: str
    producer_id: int
    batch_id: int
    commit_uuid: bytes
    version: int
    parts: tuple[PartSpec, ...]


class UnreadableFile(Exception):
    """The first 16 bytes of a file are damaged, or of a newer version: what it holds is not known."""


class Frame(NamedTuple):
    """A good frame that a start found, for a batch with its header; `fault`: what is wrong with the bytes after it."""

    kind: int
    number: int
    uuid: bytes
    staged_us: int
    position: int
    length: int
    header: BatchHeader | None
    prepared: PreparedSet | None
    fault: str | None


def file_start(salt: int) -> bytes:
    return FILE_START.pack(_FILE_MAGIC, _VERSION, salt)


def salt_of(data: bytes | memoryview) -> int | None:
    """The salt of a file that begins with these bytes, or None if it is none of ours."""
    if len(data) < FILE_START.size:
        return None
    magic, version, salt = FILE_START.unpack_from(data)
    return int(salt) if (magic, version) == (_FILE_MAGIC, _VERSION) else None


def _salted(salt: int) -> int:
    return int(crc32c(salt.to_bytes(8, "little")))


def frame(salt: int, kind: int, length: int, number: int, uuid: bytes, staged_us: int, crc: int) -> bytes:
    """The 48 bytes before a payload of `length` bytes."""
    checked = _FRAME_CHECKED.pack(_MAGIC, kind, length, number, uuid, staged_us, crc)
    return checked + _CRC.pack(crc32c(checked, _salted(salt)))


def encode_set(prepared: PreparedSet) -> bytes:
    """The payload of a prepared frame; without the commit uuid, which is in the frame."""
    name = prepared.transactional_id.encode()
    pieces = [_SET.pack(prepared.producer_id, prepared.batch_id, prepared.version, len(prepared.parts), len(name))]
    pieces += [_PART.pack(*part) for part in prepared.parts]
    data = b"".join((*pieces, name))
    return data + bytes(-len(data) % _ALIGNMENT)


def decode_set(data: bytes | memoryview, commit_uuid: bytes) -> PreparedSet:
    """The set that `encode_set` wrote; the checksum was checked before."""
    producer_id, batch_id, version, count, id_length = _SET.unpack_from(data)
    at = _SET.size
    parts = tuple(PartSpec._make(_PART.unpack_from(data, at + _PART.size * number)) for number in range(count))
    at += _PART.size * count
    name = bytes(data[at : at + id_length]).decode()
    return PreparedSet(name, producer_id, batch_id, commit_uuid, version, parts)


def scan_file(read: Read, size: int, from_position: int = 0, *, is_growing: bool = False) -> Iterator[Frame]:
    """Every good frame of a file, in order.

    Args:
        from_position: begin with the frame that begins there; 0: with the first.
        is_growing: end before a frame whose end has not come yet.

    Raises:
        UnreadableFile.
    """
    if size < FILE_START.size:
        return  # stopped before its first frame
    salt = salt_of(read(0, FILE_START.size))
    if salt is None:
        raise UnreadableFile("its first 16 bytes are damaged, or of a newer version")
    salted = _salted(salt)
    position = max(from_position, FILE_START.size)
    while (found := _next_frame(read, position, size, salted)) is not None:
        at, (_, kind, length, number, uuid, staged_us, crc, _) = found
        start = at + FRAME_SIZE
        if start + length > size:
            if is_growing:
                return
            position = at + _ALIGNMENT  # cut short, or damaged all the same: nothing behind it is inside it
            continue
        data = read(start, length)
        header = prepared = fault = None
        if kind == BATCH:
            header, fault = _checked_batch(data, crc)
        elif kind == PREPARED:
            if crc32c(data) == crc:
                prepared = decode_set(data, uuid)
            else:
                fault = "its checksum does not match"
        yield Frame(kind, number, uuid, staged_us, start, length, header, prepared, fault)
        position = start + length


class PartBatch(NamedTuple):
    """A batch of a part's file, with a header whose stamped fields mean nothing. `fault`: what is wrong with its
    body."""

    position: int
    header: BatchHeader
    fault: str | None


def scan_part(read: Read, size: int, from_position: int = 0) -> Iterator[PartBatch]:
    """The batches of a part's file, in order, up to its end, or up to where it is not known what is there."""
    position = from_position
    while size - position >= HEADER_SIZE:
        data = read(position, HEADER_SIZE)
        header = header_at(data)
        is_torn = header is None
        if header is None:
            header = BatchHeader._make(HEADER.unpack_from(data))
        if not HEADER_SIZE <= header.length <= size - position:
            return
        fault = body_fault(header, read(position, header.length))
        if is_torn and fault is not None:
            return
        yield PartBatch(position, header, fault)
        position += header.length


def is_part_cut_short(read: Read, size: int, position: int) -> bool:
    """Whether the end of a part's file, from a position on, is the beginning of a batch, as a write that is cut off
    leaves."""
    if size - position < HEADER_SIZE:
        return True
    header = header_at(read(position, HEADER_SIZE))
    return header is not None and header.length > size - position


def is_cut_short(read: Read, size: int, position: int) -> bool:
    """Whether the end of a file, from a position on, is the beginning of a frame, as a write that is cut off leaves."""
    data = bytes(read(position, min(FRAME_SIZE, size - position)))
    if len(data) < FRAME_SIZE:
        return data[: len(_MAGIC)] == _MAGIC[: len(data)]
    salt = salt_of(read(0, FILE_START.size))
    return salt is not None and _is_frame(data, 0, _salted(salt))


def _next_frame(read: Read, position: int, size: int, salted: int) -> tuple[int, tuple[Any, ...]] | None:
    """The next good frame at or after a position."""
    while size - position >= FRAME_SIZE:
        data = bytes(read(position, FRAME_SIZE))
        if _is_frame(data, 0, salted):
            return position, FRAME.unpack(data)
        position += _ALIGNMENT
        data = bytes(read(position, min(_WINDOW, size - position)))
        at = data.find(_MAGIC)
        while at >= 0:
            if at % _ALIGNMENT == 0 and (at + FRAME_SIZE > len(data) or _is_frame(data, at, salted)):
                break
            at = data.find(_MAGIC, at + 1)
        position += at if at >= 0 else max((len(data) - FRAME_SIZE) // _ALIGNMENT * _ALIGNMENT, _ALIGNMENT)
    return None


def _is_frame(data: bytes, at: int, salted: int) -> bool:
    checked = data[at : at + _FRAME_CHECKED.size]
    end = at + FRAME_SIZE
    return (
        len(data) >= end
        and checked.startswith(_MAGIC)
        and crc32c(checked, salted) == int.from_bytes(data[end - _CRC.size : end], "little")
    )


def _checked_batch(data: bytes | memoryview, crc: int) -> tuple[BatchHeader | None, str | None]:
    if len(data) < HEADER_SIZE:
        return None, "it is too short"
    try:
        header = read_header(data)
    except CorruptBatch as error:
        return None, str(error.facts["reason"])
    if header.crc != crc or header.length != len(data):
        return None, "it is another batch than was staged"
    return header, body_fault(header, data)
