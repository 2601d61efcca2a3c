from __future__ import annotations

import random

import pytest
from fastcrc.crc32 import iscsi as crc32c

from broker.storage.checksums import Checksums

DATA = random.Random(3).randbytes((1 << 20) + 3 * 1024 + 77)


@pytest.mark.parametrize("origin", [0, 8, 1024, 5000])
def test_of_any_stretch_as_if_it_was_read(origin: int) -> None:
    checksums = Checksums(lambda position, length: DATA[position : position + length], origin)
    marks = [origin, origin + 1, origin + 1023, origin + 1024, origin + 1025, 9000, 1 << 20, len(DATA) - 1, len(DATA)]
    r = random.Random(origin)
    marks = sorted(marks + [r.randrange(origin, len(DATA)) for _ in range(20)])
    pairs = [(start, end) for start in marks for end in marks if start <= end]
    r.shuffle(pairs)
    for start, end in pairs:
        assert checksums.of(start, end) == crc32c(DATA[start:end])


def test_bytes_past_the_end_have_no_checksum() -> None:
    checksums = Checksums(lambda position, length: DATA[position : position + length], 0)
    for length in (1, 1024, 1 << 20):
        assert checksums.of(0, len(DATA) + length) is None
    assert checksums.of(len(DATA) + 5000, len(DATA) + 5001) is None
    assert checksums.of(0, len(DATA)) == crc32c(DATA)


def test_bytes_are_read_once_however_often_they_are_asked_for() -> None:
    read = 0

    def counted(position: int, length: int) -> bytes:
        nonlocal read
        data = DATA[position : position + length]
        read += len(data)
        return data

    checksums = Checksums(counted, 0)
    for start in range(0, 200_000, 200):
        checksums.of(start, start + 800_000)
    assert read < 2 * len(DATA) + 1000 * 2 * 1024
