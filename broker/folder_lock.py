"""A folder that one process at a time may use."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from kafkalog.errors import DataDirInUse


def lock_folder(folder: Path, name: str) -> IO[str]:
    """Lock a folder (created if missing) until the returned file is closed or this process ends.

    Args:
        name: of the file in it that is locked; it names the process that holds it.

    Raises:
        DataDirInUse: another process has the lock.
        OSError: the folder or file cannot be created or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / name).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise DataDirInUse(directory=str(folder), pid=holder) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
