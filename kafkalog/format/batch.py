"""The record batch: the unit on disk, on the wire and under sendfile. Knows the fixed header and the checks; the body's
columns are in `format/columns.py`. No I/O.

Layout, little-endian, 96 bytes, followed by one Arrow IPC encapsulated RecordBatch message (no schema), the whole
padded to a multiple of 8:

    at  size  field
     0  i64   base_offset           stamped by the leader; 0 from a producer
     8  i32   length                of the whole batch, this header and padding included
    12  i32   leader_epoch          stamped by the leader
    16  i64   append_timestamp_us   stamped by the leader
    24  u32   header_crc            CRC-32C of bytes 0..24
    28  u32   crc                   CRC-32C of bytes 32..length: what the producer made, untouched by stamping
    32  u8    magic                 1
    33  u8    codec                 0 none, 1 lz4, 2 zstd (Arrow's own buffer compression)
    34  u16   attributes            which columns are present: bits of `format/columns.py`
    36  i32   schema_id             0: the columns of `format/columns.py`
    40  i32   record_count          at least 1
    44  i32   last_offset_delta     last record's offset - base_offset; record_count - 1 unless compacted
    48  i64   min_timestamp_us
    56  i64   max_timestamp_us
    64  i64   producer_id           -1: not idempotent
    72  i16   producer_epoch        -1: not idempotent
    74  i32   base_sequence         of the first record, -1: not idempotent; wraps to 0 after 2**31 - 1
    78  i64   transaction_batch_id  -1: none; else of a staged write, and base_sequence counts the part's batches
    86  i32   part                  -1: none; else the number of the staged part, which is Spark's of the task
    90  6     zero

There are two checksums, so that after damage to the body the length is still known to be right.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from fastcrc.crc32 import iscsi as crc32c

from kafkalog.errors import CorruptBatch

HEADER = struct.Struct("<qiiqIIBBHiiiqqqhiqi6x")
HEADER_SIZE = 96
assert HEADER.size == HEADER_SIZE
STAMPED = struct.Struct("<qiiq")  # base_offset, length, leader_epoch, append_timestamp_us: what header_crc covers
_CRC = struct.Struct("<I")
_AFTER_CRC = struct.Struct("<BBHiiiqqqhiqi6x")
STAMPED_SIZE = 24
CRC_FROM = 32
assert STAMPED.size == STAMPED_SIZE and CRC_FROM + _AFTER_CRC.size == HEADER_SIZE

MAGIC = 1
ALIGNMENT = 8
LENGTH_MAX = (1 << 31) - ALIGNMENT
SEQUENCE_MODULUS = 1 << 31
CODECS = {"none": 0, "lz4": 1, "zstd": 2}
CODEC_NAMES = {code: name for name, code in CODECS.items()}
NO_PRODUCER = -1
NO_TRANSACTION = -1
_PADDING = bytes(ALIGNMENT)


class BatchHeader(NamedTuple):
    """A batch's header; the fields and units of the module's table."""

    base_offset: int
    length: int
    leader_epoch: int
    append_timestamp_us: int
    header_crc: int
    crc: int
    magic: int
    codec: int
    attributes: int
    schema_id: int
    record_count: int
    last_offset_delta: int
    min_timestamp_us: int
    max_timestamp_us: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    transaction_batch_id: int
    part: int

    @property
    def end_offset(self) -> int:
        """The offset after the last record's."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def end_sequence(self) -> int:
        """The sequence that follows this batch's last record's."""
        return (self.base_sequence + self.record_count) % SEQUENCE_MODULUS


Batch = tuple[BatchHeader, memoryview]
"""Header and bytes, checked by whoever brings them; the bytes are writable where they are to be stamped."""


class EncodedBatch(NamedTuple):
    """A batch as its producer made it, in pieces for one vectored write; `length` is the sum of their lengths."""

    header: bytes
    body: memoryview
    padding: bytes
    length: int
    record_count: int

    def tobytes(self) -> bytes:
        return b"".join((self.header, self.body, self.padding))


def encode_batch(
    body: memoryview,
    *,
    codec: int,
    attributes: int,
    record_count: int,
    min_timestamp_us: int,
    max_timestamp_us: int,
    producer_id: int = NO_PRODUCER,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    last_offset_delta: int | None = None,
    transaction_batch_id: int = NO_TRANSACTION,
    part: int = NO_TRANSACTION,
) -> EncodedBatch:
    """A batch with an Arrow message as its body; the leader stamps offset, epoch and append time later."""
    assert record_count >= 1
    padding = _PADDING[: -(HEADER_SIZE + len(body)) % ALIGNMENT]
    length = HEADER_SIZE + len(body) + len(padding)
    assert length <= LENGTH_MAX
    delta = record_count - 1 if last_offset_delta is None else last_offset_delta
    covered = _AFTER_CRC.pack(
        MAGIC, codec, attributes, 0, record_count, delta, min_timestamp_us, max_timestamp_us,
        producer_id, producer_epoch, base_sequence, transaction_batch_id, part,
    )  # fmt: skip
    crc = crc32c(body, crc32c(covered))
    if padding:
        crc = crc32c(padding, crc)
    stamped = STAMPED.pack(0, length, 0, 0)
    header = b"".join((stamped, _CRC.pack(crc32c(stamped)), _CRC.pack(crc), covered))
    return EncodedBatch(header, body, padding, length, record_count)


def stamp(batch: memoryview | bytearray, base_offset: int, leader_epoch: int, append_timestamp_us: int) -> None:
    """Write the leader's fields and header_crc into the first bytes of a batch, in place."""
    length = int.from_bytes(batch[8:12], "little")
    STAMPED.pack_into(batch, 0, base_offset, length, leader_epoch, append_timestamp_us)
    _CRC.pack_into(batch, STAMPED_SIZE, crc32c(batch[:STAMPED_SIZE]))


def header_at(data: bytes | bytearray | memoryview, position: int = 0) -> BatchHeader | None:
    """The header at a position, if its own checksum matches and its length is possible; None also if fewer than 96
    bytes are there. Does not read the body."""
    if len(data) - position < HEADER_SIZE:
        return None
    header = BatchHeader._make(HEADER.unpack_from(data, position))
    length = header.length
    if (
        crc32c(data[position : position + STAMPED_SIZE]) != header.header_crc
        or not HEADER_SIZE <= length <= LENGTH_MAX
        or length % ALIGNMENT
    ):
        return None
    return header


def read_header(data: bytes | bytearray | memoryview, position: int = 0, where: str = "a partition") -> BatchHeader:
    """As `header_at`, but raises if there is no valid header.

    Raises:
        CorruptBatch: fewer than 96 bytes there, or the header fails its check.
    """
    header = header_at(data, position)
    if header is None:
        raise CorruptBatch(partition=where, reason=_header_fault(data, position))
    return header


def _header_fault(data: bytes | bytearray | memoryview, position: int) -> str:
    """Why `header_at` found no header."""
    if len(data) - position < HEADER_SIZE:
        return f"only {len(data) - position} of its header's {HEADER_SIZE} bytes"
    header = BatchHeader._make(HEADER.unpack_from(data, position))
    if crc32c(data[position : position + STAMPED_SIZE]) != header.header_crc:
        return "its header's checksum does not match"
    return f"its length {header.length} is impossible"


def body_fault(header: BatchHeader, batch: bytes | bytearray | memoryview) -> str | None:
    """What is wrong with a whole batch whose header is good, or None. `batch`: its `length` bytes."""
    if len(batch) < header.length:
        return f"only {len(batch)} of its {header.length} bytes"
    if crc32c(batch[CRC_FROM : header.length]) != header.crc:
        return "its checksum does not match"
    return fields_fault(header)


def fields_fault(header: BatchHeader) -> str | None:
    """What is wrong with the fields under the body's checksum, or None. Call it after the checksum matched."""
    if header.magic != MAGIC:
        return f"its format version {header.magic} is not known here (1 is)"
    if header.codec not in CODEC_NAMES:
        return f"its codec {header.codec} is not known"
    if header.record_count < 1 or header.last_offset_delta < header.record_count - 1:
        return f"its record count {header.record_count} does not fit its last offset delta {header.last_offset_delta}"
    if header.min_timestamp_us > header.max_timestamp_us:
        return "its smallest timestamp is greater than its largest"
    return None


def damage_end(header: BatchHeader, data: bytes | bytearray | memoryview, position: int) -> int | None:
    """The end offset of a batch, at a position of some bytes, whose header is good and whose body is damaged.

    `last_offset_delta` is under the checksum that does not match, so it is not trusted alone. The header of the next
    batch has a checksum of its own, and its base offset is the end. If that batch is not in `data`, `last_offset_delta`
    is trusted if `record_count` agrees with it: one flipped bit cannot change both alike.

    Returns:
        None if it is not known; or if the checksum matches: such a batch is not damaged, but of a newer version.
    """
    end = position + header.length
    if crc32c(data[position + CRC_FROM : end]) == header.crc:
        return None
    following = header_at(data, end)
    if following is not None:
        return following.base_offset
    return header.end_offset if header.record_count == header.last_offset_delta + 1 else None


def iter_batches(
    data: memoryview, where: str = "a partition", *, is_stamped: bool = True
) -> Iterator[tuple[BatchHeader, memoryview]]:
    """(header, bytes) of the whole batches in a row of them, each checked. A cut last batch is left out, because a
    fetch may end with one. For batches in memory; `broker/storage/scan.py:scan` walks over a file, and past damage.

    Args:
        where: names the place (partition) in errors.
        is_stamped: whether a leader has stamped the batches; errors name no offset if not.

    Raises:
        CorruptBatch: at the first damaged batch. The fact `end_offset` is the first offset after it, if that is known.
    """
    position, end = 0, len(data)
    while end - position >= HEADER_SIZE:
        header = header_at(data, position) or read_header(data, position, where)  # raises; saves a call for each batch
        length = header.length
        if end - position < length:
            return
        batch = data if length == end else data[position : position + length]
        fault = body_fault(header, batch)
        if fault:
            if not is_stamped:
                raise CorruptBatch(partition=where, reason=fault)
            end_offset = damage_end(header, data, position)
            known = {} if end_offset is None else {"end_offset": end_offset}
            raise CorruptBatch(partition=where, offset=header.base_offset, reason=fault, **known)
        yield header, batch
        position += length
