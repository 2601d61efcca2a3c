"""A temporary folder that is removed after all processes that use it have ended, killed or not."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

# Whole paths, for whoever starts a cluster may have no PATH.
_SWEEP = 'read -r _; /bin/rm -rf -- "$1"'


class SweptFolder(NamedTuple):
    """A folder, the process that will remove it, and the descriptor that keeps it from doing so.

    The descriptor is to be inherited by every process that uses the folder (`pass_fds`), and closed by the caller. The
    sweeper ends once the last copy is closed and the folder gone.
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
