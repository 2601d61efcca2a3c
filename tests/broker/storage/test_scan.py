"""Scans of bytes in memory; the crash tests do the same through a whole log."""

from __future__ import annotations

import time

import pytest
from fastcrc.crc32 import iscsi as crc32c

from broker.storage import scan as recovery
from broker.storage.index import Damage
from broker.storage.scan import Places, Scan, scan
from kafkalog.format.batch import HEADER_SIZE, STAMPED, encode_batch, stamp
from kafkalog.format.columns import columns_from_lists, encode_columns
from tests.broker.storage.batches import numbered
from tests.whole_batch import check_batch


def segment(offsets: list[int], count: int = 1, epoch: int = 2) -> bytearray:
    data = bytearray()
    for offset in offsets:
        _, batch = numbered(offset, count)
        stamp(batch, offset, epoch, 5)
        data += batch
    return data


SIZE = len(segment([0]))


def scanned(
    data: bytes | bytearray,
    *,
    synced: int = 0,
    next_segment: int | None = None,
    known: Places = frozenset(),
    offset: int = 0,
    epoch: int = 0,
) -> tuple[list[int], Scan]:
    found: list[int] = []
    result = scan(
        lambda position, length: bytes(data[position : position + length]),
        len(data),
        position=0,
        offset=offset,
        leader_epoch=epoch,
        synced_offset=synced,
        next_segment=next_segment,
        known=known,
        on_batch=lambda header, position: found.append(header.base_offset),
    )
    return found, result


def test_whole_segment() -> None:
    found, result = scanned(segment([0, 1, 2]))
    assert found == [0, 1, 2]
    assert result == Scan(3, 3 * SIZE, 2, (), False, 0)


def test_empty_segment() -> None:
    assert scanned(b"") == ([], Scan(0, 0, 0, (), False, 0))
    assert scanned(b"", synced=4)[1] == Scan(4, 0, 0, (Damage(0, 4, 0, 0),), True, 0)


@pytest.mark.parametrize("window", [HEADER_SIZE, 200, 1 << 20])
def test_bad_body_is_skipped_by_its_length(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_WINDOW", window)
    data = segment([0, 1, 2])
    data[2 * SIZE - 1] ^= 1
    found, result = scanned(data)
    assert found == [0, 2]
    assert result.damaged == (Damage(1, 2, SIZE, 2 * SIZE),)


@pytest.mark.parametrize("window", [HEADER_SIZE, 200, 1 << 20])
def test_bad_header_is_skipped_to_where_its_body_ends(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_WINDOW", window)
    data = segment([0, 1, 2, 3])
    data[SIZE] ^= 1
    data[3 * SIZE + HEADER_SIZE] ^= 1  # no chain to the end: the body's checksum alone must tell
    found, result = scanned(data)
    assert found == [0, 2]
    assert result.damaged == (Damage(1, 2, SIZE, 2 * SIZE),)
    assert result.torn_bytes == SIZE


def test_destroyed_header_needs_a_chain_to_the_end() -> None:
    data = segment([0, 1, 2, 3])
    data[SIZE : SIZE + HEADER_SIZE] = bytes(HEADER_SIZE)
    assert scanned(data)[0] == [0, 2, 3]
    data[3 * SIZE + HEADER_SIZE] ^= 1
    found, result = scanned(data)
    assert found == [0]
    assert result.torn_bytes == 3 * SIZE


@pytest.mark.parametrize("broken_at", [HEADER_SIZE, 44, 60], ids=["body", "last_offset_delta", "under_the_checksum"])
def test_bad_body_behind_a_destroyed_header_breaks_no_chain(broken_at: int) -> None:
    data = segment([0, 1, 2, 3, 4, 5, 6])
    data[SIZE : SIZE + HEADER_SIZE] = bytes(HEADER_SIZE)
    data[4 * SIZE + broken_at] ^= 1
    found, result = scanned(data)
    assert found == [0, 2, 3, 5, 6]
    assert result.damaged == (Damage(1, 2, SIZE, 2 * SIZE), Damage(4, 5, 4 * SIZE, 5 * SIZE))
    data[5 * SIZE + HEADER_SIZE] ^= 1
    assert scanned(data)[0] == [0, 2, 3, 6]


@pytest.mark.parametrize("synced", [3, 4])
@pytest.mark.parametrize("body", range(4))
@pytest.mark.parametrize("header", range(4))
def test_a_destroyed_header_and_a_bad_body_cost_no_other_batch(header: int, body: int, synced: int) -> None:
    data = segment([0, 1, 2, 3])
    data[header * SIZE : header * SIZE + HEADER_SIZE] = b"\xff" * HEADER_SIZE
    data[body * SIZE + HEADER_SIZE + 1] ^= 1
    known = {(synced * SIZE, synced)}
    found, _ = scanned(data, synced=synced, known=known)
    assert found == [number for number in range(4) if number not in (header, body)]


def test_destroyed_header_before_the_recovery_point_needs_a_chain_up_to_it() -> None:
    data = segment([0, 1, 2, 3])
    data[SIZE : SIZE + HEADER_SIZE] = bytes(HEADER_SIZE)
    data[3 * SIZE + HEADER_SIZE] ^= 1
    found, result = scanned(data, synced=3, known={(3 * SIZE, 3)})
    assert found == [0, 2]
    assert result == Scan(3, 3 * SIZE, 2, (Damage(1, 2, SIZE, 2 * SIZE),), False, SIZE)


@pytest.mark.parametrize("destroyed", [(1, 5), (1, 2, 5), (1, 5, 6)])
@pytest.mark.parametrize("number", [3, 4, 5])
def test_two_destroyed_headers_cost_nothing_between_them_that_leads_over_a_known_place(
    number: int, destroyed: tuple[int, ...]
) -> None:
    data = segment(list(range(9)))
    for each in destroyed:
        data[each * SIZE : each * SIZE + HEADER_SIZE] = bytes(HEADER_SIZE)
    left = [each for each in range(9) if each not in destroyed]
    assert scanned(data, known={(number * SIZE, number)})[0] == left
    for position, offset in ((number * SIZE + 8, number), (number * SIZE, number + 1), (number * SIZE, number - 1)):
        assert scanned(data, known={(position, offset)})[0] == [0, *(each for each in left if each > destroyed[-1])]


@pytest.mark.parametrize("bad_bodies", [(2,), (2, 3), (4,), (3, 4)])
def test_a_bad_body_breaks_no_chain_over_a_known_place(bad_bodies: tuple[int, ...]) -> None:
    data = segment(list(range(9)))
    for each in (1, 6):
        data[each * SIZE : each * SIZE + HEADER_SIZE] = bytes(HEADER_SIZE)
    for each in bad_bodies:
        data[each * SIZE + HEADER_SIZE] ^= 1
    left = [each for each in range(9) if each not in (1, 6, *bad_bodies)]
    for number in (2, 3, 4, 5, 6):
        assert scanned(data, known={(number * SIZE, number)})[0] == left


def batch_of(value: bytes, offset: int) -> bytearray:
    """The batch of one record, as the log has it."""
    columns = columns_from_lists([value], 5)
    batch = encode_batch(
        encode_columns(columns.batch, 0), codec=0, attributes=columns.attributes, record_count=1,
        min_timestamp_us=5, max_timestamp_us=5,
    )  # fmt: skip
    stamped = bytearray(batch.tobytes())
    stamp(stamped, offset, 2, 5)
    return stamped


def test_of_two_chains_that_meet_the_one_that_begins_first_counts() -> None:
    """That of the batches, and what the last of them holds, to its very end."""
    inner = bytes(segment([3]))
    outer = batch_of(inner, 3)
    assert outer.endswith(inner)
    data = segment([0, 1, 2]) + outer + segment([4, 5, 6])
    data[SIZE : SIZE + HEADER_SIZE] = bytes(HEADER_SIZE)
    data[-2 * SIZE : -2 * SIZE + HEADER_SIZE] = bytes(HEADER_SIZE)
    end = 3 * SIZE + len(outer)
    assert scanned(data, known={(end, 4)})[0] == [0, 2, 3, 4, 6]


def look_alike(offset: int, length: int, size: int) -> bytes:
    """A good header that claims a length; its body is not good."""
    data = segment([0])[:size]
    stamped = STAMPED.pack(offset, length, 2, 5)
    data[: len(stamped) + 4] = stamped + crc32c(stamped).to_bytes(4, "little")
    return bytes(data)


def counted_scan(data: bytearray) -> tuple[Scan, int]:
    """A scan, and how many bytes it read."""
    read = 0

    def reading(position: int, length: int) -> bytes:
        nonlocal read
        found = bytes(data[position : position + length])
        read += len(found)
        return found

    result = scan(
        reading, len(data), position=0, offset=0, leader_epoch=0, synced_offset=0, next_segment=None, known=frozenset(),
        on_batch=lambda header, position: None,
    )  # fmt: skip
    return result, read


@pytest.mark.parametrize(
    ("size", "apart"),
    [(32, 12_000), (HEADER_SIZE, 6_000), (HEADER_SIZE, None)],
    ids=["that lead nowhere", "that lead to others", "that lead to the end"],
)
def test_a_payload_full_of_headers_takes_time_by_its_bytes(size: int, apart: int | None) -> None:
    """Each was compared with all others that were open, and what it claims to hold was read."""
    count = 24_000
    behind = segment([2]) + batch_of(bytes(count * size), 3)
    whole = count * size + len(behind)
    payload = b"".join(
        look_alike((1 << 40) + number, apart * size if apart else whole - number * size, size)
        for number in range(count)
    )
    outer = batch_of(payload, 1)
    assert outer.endswith(payload)
    data = segment([0]) + outer + behind
    data[SIZE : SIZE + 28] = bytes(28)
    before = time.thread_time()
    result, read = counted_scan(data)
    assert result.damaged == (Damage(1, 2, SIZE, SIZE + len(outer)),)
    assert result.end_offset == 4
    assert read < 30 * len(data)
    assert time.thread_time() - before < 5  # it is 0.1 to 1 s, and was 13 to 30 s


def test_a_body_that_holds_batches_is_skipped_to_its_own_end() -> None:
    """The checksum goes on over each of them; none is taken for a batch although they chain to the next."""
    inner = bytes(segment([1, 2, 3]))
    outer = batch_of(inner, 1)
    assert inner in outer and outer.index(inner) % 8 == 0
    outer[3] ^= 1  # its header is bad, its body whole
    found, result = scanned(segment([0]) + outer + segment([2, 3]))
    assert found == [0, 2, 3]
    assert result.damaged == (Damage(1, 2, SIZE, SIZE + len(outer)),)


def test_a_body_that_ends_with_a_batch_at_the_end_of_the_segment_is_skipped() -> None:
    """It chains to the end of the segment, but so does the batch that holds it."""
    outer = batch_of(bytes(segment([2])), 1)
    outer[3] ^= 1  # its header is bad, its body whole
    found, result = scanned(segment([0]) + outer)
    assert found == [0]
    assert result.damaged == (Damage(1, 2, SIZE, SIZE + len(outer)),)
    assert (result.end_offset, result.tail_damaged) == (2, True)


@pytest.mark.parametrize(("offset", "epoch"), [(2, 1), (1, 3)], ids=["to an older epoch", "to the same offset"])
def test_a_batch_with_lower_offset_or_epoch_breaks_a_chain(offset: int, epoch: int) -> None:
    data = segment([0, 7], epoch=1) + segment([1], epoch=2) + segment([offset], epoch=epoch)
    data[SIZE : SIZE + HEADER_SIZE] = bytes(HEADER_SIZE)
    found, result = scanned(data)
    assert found == [0, offset]
    assert result.damaged == (Damage(1, offset, SIZE, 3 * SIZE),)  # the last alone reaches the end


def test_a_batch_of_the_next_segment_is_not_believed_behind_damage() -> None:
    data = segment([0, 7, 1, 2])
    data[SIZE : SIZE + HEADER_SIZE] = bytes(HEADER_SIZE)
    assert scanned(data)[0] == [0, 1, 2]
    assert scanned(data, next_segment=2)[0] == [0]  # the offset 2 is the next one's


def test_torn_tail_is_cut_and_counted() -> None:
    data = segment([0, 1, 2])
    for length in range(2 * SIZE + 1, 3 * SIZE):
        found, result = scanned(data[:length])
        assert found == [0, 1]
        assert result == Scan(2, 2 * SIZE, 2, (), False, length - 2 * SIZE)


def test_a_torn_batch_behind_one_with_a_bad_body_is_cut_off_with_it() -> None:
    data = segment([0, 1, 2])
    data[2 * SIZE - 1] ^= 1
    found, result = scanned(data[:-8])
    assert found == [0]
    assert result == Scan(1, SIZE, 2, (), False, 2 * SIZE - 8)


@pytest.mark.parametrize(
    ("at", "field"),
    [(32, b"\x09"), (33, b"\x63"), (40, bytes(4)), (44, b"\xff\xff\xff\xff")],
    ids=["magic", "codec", "record count", "last offset"],
)
def test_a_batch_whose_fields_make_no_sense_is_damage_whatever_its_checksum_says(at: int, field: bytes) -> None:
    data = segment([0, 1, 2])
    batch = data[SIZE : 2 * SIZE]
    batch[at : at + len(field)] = field
    batch[28:32] = crc32c(bytes(batch[32:])).to_bytes(4, "little")
    data[SIZE : 2 * SIZE] = batch
    found, result = scanned(data)
    assert found == [0, 2]
    assert result.damaged == (Damage(1, 2, SIZE, 2 * SIZE),)


def test_last_batches_with_bad_bodies_are_all_torn() -> None:
    data = segment([0, 1, 2, 3])
    for number in (2, 3):
        data[number * SIZE + HEADER_SIZE] ^= 1
    assert scanned(data)[1] == Scan(2, 2 * SIZE, 2, (), False, 2 * SIZE)


def test_last_batch_with_a_whole_body_and_a_bad_header_is_damage_and_keeps_its_offsets() -> None:
    data = segment([0, 3], count=3)
    size = len(data) // 2
    data[size + 3] ^= 1
    assert scanned(data)[1] == Scan(6, 2 * size, 2, (Damage(3, 6, size, 2 * size),), True, 0)


def test_what_is_missing_before_the_recovery_point_is_damage() -> None:
    data = segment([0, 1])
    assert scanned(data, synced=5)[1] == Scan(5, 2 * SIZE, 2, (Damage(2, 5, 2 * SIZE, 2 * SIZE),), True, 0)
    assert scanned(data + bytes(9), synced=5)[1].damaged == (Damage(2, 5, 2 * SIZE, 2 * SIZE + 9),)


def test_batches_out_of_order_are_not_believed() -> None:
    found, result = scanned(segment([0, 5, 1]))
    assert found == [0, 1]  # 5 would leave a gap, and what follows does not chain to it
    assert result.damaged == (Damage(1, 1, SIZE, 2 * SIZE),)
    assert scanned(segment([0, 5]))[0] == [0, 5]  # a gap with nothing against it: lost, told, gone on
    assert scanned(segment([0, 5]))[1].damaged == (Damage(1, 5, SIZE, SIZE),)
    assert scanned(segment([0, 0]))[0] == [0]
    assert scanned(segment([0, 1]), next_segment=1)[0] == [0]


def test_older_epoch_behind_a_newer_one_is_not_believed() -> None:
    data = segment([0], epoch=3) + segment([1], epoch=2)
    assert scanned(data)[0] == [0]
    assert scanned(segment([0], epoch=2), epoch=3)[0] == []


def test_scan_starts_behind_what_is_known() -> None:
    data = segment([0, 1, 2])
    found: list[int] = []
    result = scan(
        lambda position, length: bytes(data[position : position + length]),
        len(data),
        position=SIZE,
        offset=1,
        leader_epoch=2,
        synced_offset=1,
        next_segment=None,
        known=frozenset(),
        on_batch=lambda header, position: found.append(header.base_offset),
    )
    assert found == [1, 2]
    assert result.end_offset == 3


def test_batch_of_several_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_WINDOW", 256)
    _, big = numbered(0, 20, 100)
    stamp(big, 0, 0, 0)
    data = bytes(big) + bytes(segment([20]))
    assert check_batch(data).length > 5 * 256
    assert scanned(data)[0] == [0, 20]
    assert scanned(data[:-SIZE][:-8])[0] == []
