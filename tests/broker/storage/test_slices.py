from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NoReturn

import pytest

from broker.storage.disk import Disk
from broker.storage.segment import FileSlice, SharedFile


def failed(error: OSError) -> NoReturn:
    raise AssertionError(error)


def shared(path: Path) -> SharedFile:
    path.write_bytes(b"0123456789")
    return SharedFile(Disk(), Disk().open(path))


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_last_owner_closes_the_file(tmp_path: Path) -> None:
    file = shared(tmp_path / "x")
    assert file.share()
    file.release()
    assert is_open(file.fd)
    file.release()
    assert not is_open(file.fd)
    assert not file.share()


def test_slice_sends_its_bytes_though_the_file_is_gone(tmp_path: Path) -> None:
    file = shared(tmp_path / "x")
    assert file.share()
    held = FileSlice(Disk(), file, 0, 3, 4, failed)
    file.release()
    (tmp_path / "x").unlink()
    ours, theirs = socket.socketpair()
    with ours, theirs, held:
        assert os.sendfile(ours.fileno(), held.fileno(), held.position, held.length) == 4
        assert theirs.recv(10) == held.read() == b"3456"
    assert not is_open(file.fd)
    held.close()  # twice is fine


def test_empty_slice_has_no_file() -> None:
    with FileSlice(Disk(), None, 0, 0, 0, failed) as empty:
        assert empty.read() == b""
        with pytest.raises(AssertionError):
            empty.fileno()


def test_forgotten_slice_gives_its_file_back(tmp_path: Path) -> None:
    file = shared(tmp_path / "x")
    held = FileSlice(Disk(), file, 0, 0, 1, failed)
    assert held.length == 1
    del held
    assert not is_open(file.fd)
