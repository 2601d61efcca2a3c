from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from broker.storage.disk import Disk, is_full, storage_error, write_all
from kafkalog.errors import DiskFull, StorageFailed


def test_more_buffers_than_one_call_takes_are_all_written(tmp_path: Path) -> None:
    disk = Disk()
    fd = disk.create(tmp_path / "x")
    buffers = [b"%05d" % number for number in range(3000)]
    write_all(disk, fd, [b"first", *buffers], 7)
    assert disk.read(fd, 1 << 20, 7) == b"first" + b"".join(buffers)
    disk.close(fd)


def test_created_file_must_be_new(tmp_path: Path) -> None:
    disk = Disk()
    disk.close(disk.create(tmp_path / "x"))
    with pytest.raises(FileExistsError):
        disk.create(tmp_path / "x")


def test_a_name_exists_whatever_it_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    disk = Disk()
    assert disk.exists(tmp_path) and disk.exists(tmp_path / "link")
    assert not disk.exists(tmp_path / "x")
    assert not disk.exists(tmp_path / "x" / "y")


def test_descriptors_are_not_inherited(tmp_path: Path) -> None:
    disk = Disk()
    for fd in (disk.create(tmp_path / "x"), disk.open(tmp_path / "x"), disk.lock(tmp_path / "lock")):
        assert fd is not None
        assert not os.get_inheritable(fd)
        disk.close(fd)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_lack_of_room_is_a_full_disk(code: int) -> None:
    error = OSError(code, os.strerror(code))
    assert is_full(error)
    assert isinstance(storage_error(Path("/data"), error, "writing"), DiskFull)


def test_other_errors_name_the_directory_and_the_operation() -> None:
    failed = storage_error(Path("/data"), OSError(errno.EIO, os.strerror(errno.EIO)), "writing meta")
    assert isinstance(failed, StorageFailed)
    assert str(failed) == "log directory /data is out of service: writing meta: Input/output error"


def test_really_full_disk_refuses_and_takes_no_byte() -> None:
    """/dev/full is the one full disk that every Linux has."""
    disk = Disk()
    fd = disk.open(Path("/dev/full"), write=True)
    with pytest.raises(OSError) as caught:
        write_all(disk, fd, [b"x"], 0)
    assert is_full(caught.value)
    disk.close(fd)
