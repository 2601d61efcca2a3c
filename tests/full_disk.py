"""A disk without room, for a Python that is started with this folder first on its path."""

from __future__ import annotations

FULL_DISK = """
import errno, os, re

def full(fd, buffers, offset, write=os.pwritev):
    if re.search(r"/\\d{20}[.]log$", os.readlink(f"/proc/self/fd/{fd}")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(fd, buffers, offset)

os.pwritev = full
"""
"""A sitecustomize of every Python of a cluster: no segment has room. To mount a small file system would take rights."""
