"""What a checkpoint says of a batch: the same after a restart, another in a copy, unknown where it can not be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyspark_kafkalog.fingerprint import UNKNOWN, fingerprint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "check point"
    (folder / "offsets").mkdir(parents=True)
    (folder / "offsets" / "7").write_text("v1\n{}\n{}")
    return folder


def test_it_tells_what_is_planned_and_not_where_the_checkpoint_is(checkpoint: Path, tmp_path: Path) -> None:
    first = fingerprint(str(checkpoint), 7)
    assert len(first) == 32
    assert fingerprint(str(checkpoint.rename(tmp_path / "moved")), 7) == first
    (tmp_path / "moved" / "offsets" / "7").write_text("v1\n{}\n{later}")
    assert fingerprint(str(tmp_path / "moved"), 7) not in (first, UNKNOWN)


def test_a_file_address_is_read_as_the_path_is(checkpoint: Path) -> None:
    assert (
        fingerprint(f"file://{checkpoint}", 7)
        == fingerprint(f"file:{checkpoint}/", 7)
        == fingerprint(str(checkpoint), 7)
    )


def test_what_can_not_be_read_is_unknown(checkpoint: Path) -> None:
    for location in (None, "", f"hdfs://host:1{checkpoint}", f"s3a://bucket{checkpoint}", str(checkpoint / "no")):
        assert fingerprint(location, 7) == UNKNOWN
    assert fingerprint(str(checkpoint), 8) == UNKNOWN
