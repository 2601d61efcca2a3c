"""A temporary folder that is removed after all processes that use it have ended, killed or not."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

# Absolute paths, because the process that starts a cluster may have no PATH.
_SWEEP = 'read -r _; /bin/rm -rf -- "$1"'


class SweptFolder(NamedTuple):
    """A folder, the process that will remove it, and the descriptor that delays the removal.

    Every process that uses the folder has to inherit the descriptor (`pass_fds`); the caller closes its own copy. When
    the last copy is closed, the sweeper removes the folder and ends.
    """

    path: Path
    sweeper: subprocess.Popen[bytes]
    keep_fd: int


def swept_folder(prefix: str) -> SweptFolder:
    """Make a temporary folder and start the process that removes it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        return SweptFolder(folder, *_start_sweeper(folder))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _start_sweeper(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    reading, writing = os.pipe()
    try:
        sweeper = subprocess.Popen(
            ["/bin/sh", "-c", _SWEEP, "sh", str(folder)],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return sweeper, writing
