from __future__ import annotations

from pathlib import Path

import pytest

from broker.storage.checkpoint import (
    Checkpoint,
    read_checkpoint,
    read_label,
    seal,
    unseal,
    write_atomic,
    write_checkpoint,
)
from broker.storage.disk import Disk


def test_sealed_document_comes_back() -> None:
    facts = {"cluster_id": "é x", "broker_id": 3}
    assert unseal(seal(facts)) == facts


def test_sealed_document_survives_any_flipped_bit_and_the_loss_of_either_copy() -> None:
    facts = {"recovery_point": 120, "start_offset": 7}
    data = seal(facts)
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            assert unseal(bytes(flipped)) == facts, (at, bit)
    half = len(data) // 2
    assert unseal(data[:half]) == unseal(data[half:]) == facts
    assert unseal(data[: half - 2]) is None


@pytest.mark.parametrize("junk", [b"", b"\n", b"0 {}\n", b"not a checkpoint", bytes(100)])
def test_junk_is_no_document(junk: bytes) -> None:
    assert unseal(junk) is None


def test_document_of_another_shape_is_no_checkpoint(tmp_path: Path) -> None:
    disk = Disk()
    assert read_checkpoint(disk, tmp_path) is None
    write_atomic(disk, tmp_path / "checkpoint", seal({"start_offset": "x"}))
    assert read_checkpoint(disk, tmp_path) is None
    assert read_label(disk, tmp_path) is None
    write_checkpoint(disk, tmp_path, Checkpoint(3, 9, 40), "flights-7")
    assert read_checkpoint(disk, tmp_path) == Checkpoint(3, 9, 40)
    assert read_label(disk, tmp_path) == "flights-7"


def test_the_recovery_point_is_in_the_segment_of_the_record_before_it() -> None:
    checkpoint = Checkpoint(3, 9, 40)
    assert checkpoint.places_in(8) == {(40, 9)}
    assert checkpoint.places_in(9) == frozenset()
    assert Checkpoint(3, 9).places_in(8) == frozenset()  # its position is not known


def test_atomic_write_replaces_the_file_and_what_an_earlier_one_left(tmp_path: Path) -> None:
    path = tmp_path / "x"
    (tmp_path / "x.tmp").write_bytes(b"left over")
    write_atomic(Disk(), path, b"one")
    write_atomic(Disk(), path, b"two", durable=False)
    assert path.read_bytes() == b"two"
    assert [found.name for found in tmp_path.iterdir()] == ["x"]
