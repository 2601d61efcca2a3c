"""A process that removes a folder once everybody who uses it is gone, killed or not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

# Whole paths, for whoever starts a cluster may have no PATH.
_SWEEP = 'read -r _; /bin/rm -rf -- "$1"'


def start_sweeper(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start the process that will remove a folder.

    Returns:
        The process, and a descriptor that keeps it from doing so: to be inherited by every process that uses the folder
        (`pass_fds`), and closed by the caller. The process ends once the last copy is closed.
    """
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
