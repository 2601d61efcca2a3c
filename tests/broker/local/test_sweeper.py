from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from broker.local.sweeper import swept_folder


def test_a_folder_goes_once_the_last_descriptor_is_closed() -> None:
    folder, sweeper, keep_fd = swept_folder("kafkalog-test-")
    other = os.dup(keep_fd)
    (folder / "kept").write_text("x")
    os.close(keep_fd)
    assert sweeper.poll() is None
    assert (folder / "kept").exists()
    os.close(other)
    assert sweeper.wait(60) == 0
    assert not folder.exists()


def test_without_a_process_to_remove_it_there_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", no_process)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BlockingIOError):
        swept_folder("kafkalog-test-")
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == files
