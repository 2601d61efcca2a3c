"""What a start takes for good in a file of staged frames, byte by byte."""

from __future__ import annotations

import pytest
from fastcrc.crc32 import iscsi as crc32c

from broker.staging.format import (
    BATCH,
    PREPARED,
    Frame,
    PartSpec,
    PreparedSet,
    encode_set,
    file_start,
    frame,
    scan_file,
)
from tests.broker.storage.batches import make_batch

SALT, UUID = 7, b"u" * 16


def found_in(kind: int, data: bytes, crc: int) -> Frame:
    """What a start finds of one frame and what follows it."""
    file = file_start(SALT) + frame(SALT, kind, len(data), 0, UUID, 1, crc) + data
    [found] = scan_file(lambda position, length: file[position : position + length], len(file))
    return found


def test_a_good_batch_of_the_same_length_that_is_not_the_one_that_was_staged_is_damage() -> None:
    """As a disk leaves it that wrote to a wrong place."""
    staged, other = (make_batch([value], producer=(1, 0, 0), transaction=(0, 0)) for value in (b"one", b"two"))
    assert len(staged[1]) == len(other[1])
    assert found_in(BATCH, bytes(staged[1]), staged[0].crc).fault is None
    found = found_in(BATCH, bytes(other[1]), staged[0].crc)
    assert found.fault == "it is another batch than was staged" and found.header is None


@pytest.mark.parametrize("at", [0, 40, -1])
def test_a_damaged_set_is_none(at: int) -> None:
    prepared = PreparedSet("x", 1, 0, UUID, -1, (PartSpec(b"p" * 16, 0, 1, 100),))
    data = bytearray(encode_set(prepared))
    crc = crc32c(bytes(data))
    assert found_in(PREPARED, bytes(data), crc).prepared == prepared
    data[at] ^= 1
    found = found_in(PREPARED, bytes(data), crc)
    assert (found.prepared, found.fault) == (None, "its checksum does not match")
