from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker.folder_lock import lock_folder
from kafkalog.errors import DataDirInUse


def test_a_folder_is_one_holders_until_its_file_is_closed(tmp_path: Path) -> None:
    held = lock_folder(tmp_path / "made", "lock")
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DataDirInUse, match=f"{os.getpid()}") as refused:
        lock_folder(tmp_path / "made", "lock")
    assert refused.value.__traceback__ is not None  # whatever it holds is held still
    assert len(os.listdir("/proc/self/fd")) == files
    held.close()
    lock_folder(tmp_path / "made", "lock").close()
