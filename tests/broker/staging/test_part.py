"""A part's batches, read back: what is read at once, and what is found damaged. Over files in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.staging.part import Part, PartDamaged, Place, ReadBuffer, StagedFile, check_batches, read_batches
from broker.storage.disk import Disk
from kafkalog.format.batch import CRC_FROM, STAMPED_SIZE, BatchHeader, stamp
from tests.broker.storage.batches import make_batch
from tests.whole_batch import check_batch

MIB = 1 << 20
PRODUCER, BATCH, NUMBER = 7, 3, 2


def file(number: int = 0) -> StagedFile:
    return StagedFile(Disk(), Path("/nowhere"), number, 0)


def batch(sequence: int, *, producer: int = PRODUCER, transaction: tuple[int, int] = (BATCH, NUMBER)) -> bytearray:
    _, data = make_batch([b"%d" % sequence], producer=(producer, 0, sequence), transaction=transaction)
    made = bytearray(data)
    stamp(made, 0, 0, 0)
    return made


def header_of(data: bytearray) -> BatchHeader:
    return check_batch(data)


class Stored:
    """A part whose batches stand in one file after the other. `reads`: (file, position, bytes) of each."""

    def __init__(self) -> None:
        self.part = Part(b"u" * 16, header_of(batch(0)))
        self.reads: list[tuple[int, int, int]] = []
        self._data: dict[int, bytearray] = {}

    def add(self, data: bytearray, to: StagedFile, gap: int = 0) -> None:
        """Behind so many bytes of others."""
        held = self._data.setdefault(to.number, bytearray())
        held += bytes(gap)
        crc = int.from_bytes(data[28:32], "little")
        self.part.add((to, len(held), len(data), crc), 0, 0.0)
        held += data

    def read(self, of: StagedFile, memory: memoryview, position: int) -> None:
        self.reads.append((of.number, position, len(memory)))
        memory[:] = self._data[of.number][position : position + len(memory)]

    def pieces(self, *wanted: int) -> list[list[tuple[int, bytes]]]:
        found = ReadBuffer().pieces(self.part, wanted or range(len(self.part.places)), self.read)
        return [[(number, bytes(data)) for number, data in piece] for piece in found]


@pytest.mark.parametrize("second, reads", [(MIB - 1000, 1), (MIB - 999, 2)])
def test_as_many_batches_are_read_at_once_as_stand_within_a_mebibyte(second: int, reads: int) -> None:
    stored, one = Stored(), file()
    for length in (1000, second, 10):
        stored.add(bytearray(b"x" * length), one)
    found = stored.pieces()
    assert [[number for number, _ in piece] for piece in found] == ([[0, 1], [2]] if reads == 1 else [[0], [1, 2]])
    assert sum(length for _, _, length in stored.reads) == 1000 + second + 10


def test_a_batch_that_is_larger_is_read_alone_and_what_follows_after_it() -> None:
    stored, one = Stored(), file()
    for length in (10, 3 * MIB, 20):
        stored.add(bytearray([length % 251]) * length, one)
    assert [[(number, len(data)) for number, data in piece] for piece in stored.pieces()] == [
        [(0, 10)], [(1, 3 * MIB)], [(2, 20)]
    ]  # fmt: skip


def test_what_stands_between_is_read_along_and_left_out_and_another_file_is_another_read() -> None:
    stored, one, two = Stored(), file(1), file(2)
    for text, to, gap in ((b"aa", one, 5), (b"bbb", one, 7), (b"c", two, 0), (b"dd", one, 0)):
        stored.add(bytearray(text), to, gap)
    assert stored.pieces() == [[(0, b"aa"), (1, b"bbb")], [(2, b"c")], [(3, b"dd")]]
    assert stored.reads == [(1, 5, 12), (2, 0, 1), (1, 17, 2)]
    assert stored.pieces(1, 3) == [[(1, b"bbb"), (3, b"dd")]]


def test_a_part_knows_its_length_when_it_was_renewed_and_its_latest_batch() -> None:
    part = Part(b"u" * 16, header_of(batch(0)))
    for number, staged_us in enumerate((5, 9, 7)):
        place: Place = (file(), 0, 100, 0)
        part.add(place, staged_us, float(number))
    assert (part.length, part.last_us, part.renewed, part.number) == (300, 9, 2.0, NUMBER)


def test_batches_of_others_are_told_by_each_of_what_they_say() -> None:
    part = Part(b"u" * 16, header_of(batch(0)))
    assert part.is_whose(header_of(batch(4)))
    for other in (batch(0, producer=8), batch(0, transaction=(4, NUMBER)), batch(0, transaction=(BATCH, 1))):
        assert not part.is_whose(header_of(other))


def stored(*batches: bytearray) -> Stored:
    made, one = Stored(), file()
    for data in batches:
        made.add(data, one)
    return made


def test_batches_are_read_back_and_checked() -> None:
    made = stored(batch(0), batch(1))
    found = [each for piece in read_batches(made.part, [0, 1], made.read, "t-0") for each in piece]
    assert [header.base_sequence for header, _ in found] == [0, 1]
    check_batches(made.part, [0, 1], made.read, ReadBuffer())


@pytest.mark.parametrize("at", [0, STAMPED_SIZE, CRC_FROM - 4, CRC_FROM, -1])
def test_a_flipped_bit_is_found_by_both_checks(at: int) -> None:
    made = stored(batch(0), batch(1))
    place = made.part.places[1]
    made._data[0][place[1] + at % place[2]] ^= 1
    for check in (
        lambda: list(read_batches(made.part, [0, 1], made.read, "t-0")),
        lambda: check_batches(made.part, [0, 1], made.read, ReadBuffer()),
    ):
        with pytest.raises(PartDamaged, match=r"batch 1 of part 2: its .*checksum does not match"):
            check()
    check_batches(made.part, [0], made.read, ReadBuffer())


@pytest.mark.parametrize("other", [batch(0), batch(1, producer=8)], ids=["number", "producer"])
def test_a_whole_batch_in_the_place_of_another_is_found(other: bytearray) -> None:
    made = stored(batch(0), other)
    with pytest.raises(PartDamaged, match="batch 1 of part 2: it is another"):
        list(read_batches(made.part, [0, 1], made.read, "t-0"))


def test_a_whole_batch_with_another_checksum_than_was_staged_is_found() -> None:
    made = stored(batch(0))
    file_, position, length, crc = made.part.places[0]
    made.part.places[0] = (file_, position, length, crc ^ 1)
    with pytest.raises(PartDamaged, match="its checksum does not match"):
        check_batches(made.part, [0], made.read, ReadBuffer())
