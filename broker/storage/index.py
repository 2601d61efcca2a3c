"""A segment's sparse index: offset -> position, and timestamp -> position where a search starts. No I/O.

There is about one entry for every `index.interval.bytes` of log. Each entry is for the start of a batch. It has the
batch's base offset, its position, and the greatest timestamp of all earlier batches of the segment. This running
maximum sorts the entries. So the first record at or after a timestamp is never before the last entry with a smaller
maximum.

Saved form (`%020d.index`), little-endian: a fixed part, the damaged ranges, the entries.

     0  4s   "KLIX"
     4  u32  version                 1
     8  i64  base_offset             of the segment, as in its name
    16  i64  covered                 bytes that this file describes, from the segment's start
    24  i64  end_offset              of the covered bytes
    32  i64  max_timestamp_us        of all covered batches
    40  i64  first_append_us         append time of the first batch, -1 if there is none
    48  i64  last_append_us          latest append time of a batch, -1 if there is none
    56  i32  leader_epoch            of the last batch
    60  u32  damage_count
    64  u32  entry_count
    68  u32  crc                     CRC-32C of all other bytes
    72  4 x i64 for each damaged range: start_offset, end_offset, position, end_position
        3 x i64 for each entry:         offset, position, max_before_us

A saved index describes only synced bytes. It is rebuilt if it is damaged, or if the segment has fewer bytes than
`covered`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from fastcrc.crc32 import iscsi as crc32c

_FIXED = struct.Struct("<4sIqqqqqqiIII")
_CRC_AT = 68
FIXED_SIZE = 72
assert _FIXED.size == FIXED_SIZE
_DAMAGE = struct.Struct("<4q")
_MAGIC = b"KLIX"
_VERSION = 1
NO_TIME = -(1 << 63)
"""The maximum of no timestamps: less than every timestamp."""
assert sys.byteorder == "little", "entries are written as they are in memory"


class Damage(NamedTuple):
    """Offsets [start_offset, end_offset) that cannot be read, and the bytes [position, end_position) in their place."""

    start_offset: int
    end_offset: int
    position: int
    end_position: int


def united(damaged: Iterable[Damage]) -> tuple[Damage, ...]:
    """Sort damaged ranges, and merge those that overlap: known damage may have grown. Ranges that only touch are not
    merged."""
    found: list[Damage] = []
    for each in sorted({*damaged}):
        last = found[-1] if found else None
        if last is not None and (each.start_offset < last.end_offset or each.position < last.end_position):
            end_offset = max(last.end_offset, each.end_offset)
            end_position = max(last.end_position, each.end_position)
            found[-1] = last._replace(end_offset=end_offset, end_position=end_position)
        else:
            found.append(each)
    return tuple(found)


class Index:
    """The entries of one segment's index. One thread writes. Readers need no lock: `add` writes the offset last, and
    readers use only entries that have an offset.

    Attributes:
        next_position: the next batch at or after this position gets an entry.
    """

    def __init__(self, base_offset: int, interval_bytes: int) -> None:
        self.interval_bytes = interval_bytes
        self.offsets = array("q", [base_offset])
        self.positions = array("q", [0])
        self.max_before_us = array("q", [NO_TIME])
        self.next_position = interval_bytes

    def add(self, offset: int, position: int, max_before_us: int) -> None:
        self.positions.append(position)
        self.max_before_us.append(max_before_us)
        self.offsets.append(offset)
        self.next_position = position + self.interval_bytes

    def before(self, offset: int) -> tuple[int, int]:
        """(position, offset) of the last entry at or before an offset, or else of the segment's start."""
        entry = max(bisect_right(self.offsets, offset) - 1, 0)
        return self.positions[entry], self.offsets[entry]

    def before_time(self, timestamp_us: int) -> tuple[int, int]:
        """(position, offset) of an entry. The first record at or after the timestamp is not before it."""
        entry = max(bisect_left(self.max_before_us, timestamp_us, hi=len(self.offsets)) - 1, 0)
        return self.positions[entry], self.offsets[entry]

    def around(self, position: int) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """(position, offset) of the last entry at or before a position, and of the entry after it, if there is one."""
        after = bisect_right(self.positions, position, hi=len(self.offsets))
        before = self.positions[after - 1], self.offsets[after - 1]
        return before, (self.positions[after], self.offsets[after]) if after < len(self.offsets) else None

    def at_or_after(self, offset: int) -> tuple[int, int] | None:
        """(position, offset) of the first entry at or after an offset."""
        entry = bisect_left(self.offsets, offset, hi=len(self.offsets))
        return (self.positions[entry], self.offsets[entry]) if entry < len(self.offsets) else None

    def up_to(self, offset: int) -> Index:
        """A copy without the entries at or after an offset, except the first entry."""
        keep = max(bisect_left(self.offsets, offset), 1)
        copy = Index(self.offsets[0], self.interval_bytes)
        copy.offsets, copy.positions = self.offsets[:keep], self.positions[:keep]
        copy.max_before_us = self.max_before_us[:keep]
        copy.next_position = copy.positions[-1] + copy.interval_bytes
        return copy


def places(index: Index, damaged: Iterable[Damage], from_position: int = 0) -> set[tuple[int, int]]:
    """Known starts of batches as (position, offset): the index entries from a position on, and the ends of damage."""
    entry = bisect_left(index.positions, from_position, hi=len(index.offsets))
    entries = zip(index.positions[entry:], index.offsets[entry:], strict=False)
    return {*entries, *((damage.end_position, damage.end_offset) for damage in damaged)}


class Summary(NamedTuple):
    """A saved index without its entries. The module's docstring describes the fields."""

    base_offset: int
    covered: int
    end_offset: int
    max_timestamp_us: int
    first_append_us: int
    last_append_us: int
    leader_epoch: int
    damaged: tuple[Damage, ...]


def encode_index(index: Index, summary: Summary) -> bytes:
    """Encode the saved form, without entries at or after `summary.covered`. It always has the first entry."""
    count = bisect_left(index.positions, summary.covered, hi=len(index.offsets)) or 1
    entries = array("q", bytes(24 * count))
    entries[0::3] = index.offsets[:count]
    entries[1::3] = index.positions[:count]
    entries[2::3] = index.max_before_us[:count]
    fixed = bytearray(
        _FIXED.pack(
            _MAGIC, _VERSION, summary.base_offset, summary.covered, summary.end_offset, summary.max_timestamp_us,
            summary.first_append_us, summary.last_append_us, summary.leader_epoch, len(summary.damaged), count, 0,
        )
    )  # fmt: skip
    rest = b"".join(_DAMAGE.pack(*damage) for damage in summary.damaged) + entries.tobytes()
    struct.pack_into("<I", fixed, _CRC_AT, crc32c(rest, crc32c(fixed[:_CRC_AT])))
    return bytes(fixed) + rest


def decode_index(data: bytes, base_offset: int, interval_bytes: int) -> tuple[Index, Summary] | None:
    """Decode a saved index; None if it is damaged, or of another segment."""
    if len(data) < FIXED_SIZE:
        return None
    magic, version, base, covered, end, newest, first, last, epoch, damage_count, count, crc = _FIXED.unpack_from(data)
    if (magic, version, base) != (_MAGIC, _VERSION, base_offset):
        return None
    if count < 1 or len(data) != FIXED_SIZE + _DAMAGE.size * damage_count + 24 * count:
        return None
    if crc32c(data[FIXED_SIZE:], crc32c(data[:_CRC_AT])) != crc:
        return None
    entries_at = FIXED_SIZE + _DAMAGE.size * damage_count
    damaged = tuple(Damage._make(found) for found in _DAMAGE.iter_unpack(data[FIXED_SIZE:entries_at]))
    entries = array("q", data[entries_at:])
    index = Index(base_offset, interval_bytes)
    index.offsets, index.positions, index.max_before_us = entries[0::3], entries[1::3], entries[2::3]
    index.next_position = index.positions[-1] + interval_bytes
    return index, Summary(base, covered, end, newest, first, last, epoch, damaged)
