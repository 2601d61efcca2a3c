"""What a checkpoint says of a batch's input, as a hash: tells a stream that was started again from a copy of it.

Before a micro-batch runs, Spark writes which offsets it reads, and when it was planned, to
`<checkpointLocation>/offsets/<batch id>`. A query that is started again reuses the file; one that runs on a copy of the
checkpoint and plans the batch itself writes another. Knows no broker.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

UNKNOWN = b""

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(//[^/]*)?")


def fingerprint(checkpoint_location: str | None, batch_id: int) -> bytes:
    """SHA-256 of the batch's file; UNKNOWN where the sink was not told of a checkpoint, or can not read it.

    Args:
        checkpoint_location: the stream's option, a local path or a `file:` address; other file systems are not read.
    """
    if not checkpoint_location:
        return UNKNOWN
    scheme = _SCHEME.match(checkpoint_location)
    if scheme and scheme[1].lower() != "file":
        return UNKNOWN
    path = checkpoint_location[scheme.end() :] if scheme else checkpoint_location
    try:
        text = Path(path, "offsets", str(batch_id)).read_bytes()
    except OSError:
        return UNKNOWN
    return hashlib.sha256(text).digest()
