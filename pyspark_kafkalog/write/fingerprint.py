"""A hash of what a checkpoint says of a batch's input. It distinguishes a restart from a start on a copy of the
checkpoint.

Before a micro-batch runs, Spark writes which offsets it reads, and when it was planned, to `<checkpoint>/offsets/<batch
id>`. A query that is started again reuses the file; a query on a copy of the checkpoint that plans the batch itself
writes another. Only tasks know where the checkpoint is, unless the write has the option. Checkpoints on other file
systems than the driver's are read as Spark does (`hadoop.py`). Knows no broker.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kafkalog.events import get_logger
from pyspark_kafkalog.write.hadoop import HadoopFiles, HadoopUnavailable, SessionFiles
from pyspark_kafkalog.write.micro_batch import MicroBatch

if TYPE_CHECKING:
    from pyspark import TaskContext

log = get_logger(__name__)

UNKNOWN = b""

CONFIGURED = "spark.sql.streaming.checkpointLocation"
_HADOOP = "spark.hadoop."
_JARS = ("spark.jars", "spark.repl.local.jars")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):(//[^/]*)?")
_AGAIN_SECONDS = 600.0  # after a Java that did not start, so that not each batch waits for one


class CheckpointUnreadable(Exception):
    """A checkpoint's files are missing, are another query's, or cannot be read; the sentence says which."""


class Checkpoint(NamedTuple):
    """The location of a query's checkpoint, and the settings to read it.

    Attributes:
        location: as given to Spark, with the query's name if that is part of it; empty: not given.
        query_id: as Spark reports it; empty if it does not.
        hadoop: the application's settings for file systems, sorted.
        jars: paths with commas between.
        files: reads it as Spark does, in the process of the session.
    """

    location: str
    query_id: str
    hadoop: tuple[tuple[str, str], ...] = ()
    jars: str = ""
    files: SessionFiles | None = None


def checkpoint_of(task: TaskContext, micro_batch: MicroBatch, option: str | None) -> Checkpoint:
    """The checkpoint of the query that a task is part of.

    Args:
        option: the write's own `checkpointLocation`.
    """
    properties: Mapping[str, str] = task._localProperties or {}
    location = option or _configured(properties.get(CONFIGURED, ""), micro_batch.name)
    hadoop = sorted((name[len(_HADOOP) :], text) for name, text in properties.items() if name.startswith(_HADOOP))
    jars = ",".join(properties[name] for name in _JARS if properties.get(name))
    return Checkpoint(location, micro_batch.query_id, tuple(hadoop), jars)


def _configured(root: str, name: str) -> str:
    """The checkpoint of a named query in the session's configured folder. A query without a name has a new checkpoint
    at each start, which is never copied."""
    return f"{root.rstrip('/')}/{name}" if root and name else ""


class Fingerprints:
    """Reads checkpoints in the committing process. A failure is logged once for each checkpoint."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._lock = threading.Lock()  # guards the start of a process
        self._files: dict[tuple[tuple[tuple[str, str], ...], str], HadoopFiles | tuple[HadoopUnavailable, float]] = {}

    def of(self, checkpoint: Checkpoint, batch_id: int) -> bytes:
        """SHA-256 of the batch's file; UNKNOWN if the checkpoint's location is unknown, or it cannot be read."""
        try:
            return self._hash(checkpoint, batch_id)
        except CheckpointUnreadable as error:
            return self._unknown(checkpoint, str(error))

    def of_earlier(self, checkpoint: Checkpoint, batch_id: int) -> bytes:
        """As `of`, for a batch whose file Spark may have deleted by now: that is not logged."""
        try:
            return self._hash(checkpoint, batch_id)
        except CheckpointUnreadable:
            return UNKNOWN

    def _hash(self, checkpoint: Checkpoint, batch_id: int) -> bytes:
        if not checkpoint.location:
            raise CheckpointUnreadable("its location is not known")
        metadata, offsets = self._read(checkpoint, "metadata", f"offsets/{batch_id}")
        if _query_id(metadata) != checkpoint.query_id:
            raise CheckpointUnreadable("it is another query's")
        return hashlib.sha256(offsets).digest()

    def query_of(self, checkpoint: Checkpoint) -> str:
        """The id of the query whose checkpoint it is. Raises CheckpointUnreadable."""
        [metadata] = self._read(checkpoint, "metadata")
        return _query_id(metadata)

    def _read(self, checkpoint: Checkpoint, *names: str) -> list[bytes]:
        try:
            return self._read_files(checkpoint, names)
        except FileNotFoundError as missing:
            raise CheckpointUnreadable(f"there is no {missing}") from missing
        except (OSError, ValueError, HadoopUnavailable) as error:
            raise CheckpointUnreadable(str(error)) from error

    def _read_files(self, checkpoint: Checkpoint, names: Sequence[str]) -> list[bytes]:
        scheme = _SCHEME.match(checkpoint.location)
        if scheme is None or scheme[1].lower() == "file":
            path = Path(checkpoint.location[scheme.end() :] if scheme else checkpoint.location)
            # Without a scheme it is in the default file system, which the session knows, and else may be given.
            if scheme or (_is_default_local(checkpoint) and (path / "metadata").exists()):
                return [(path / name).read_bytes() for name in names]
        addresses = [f"{checkpoint.location.rstrip('/')}/{name}" for name in names]
        if checkpoint.files is not None:
            return [checkpoint.files.read(address) for address in addresses]
        files = self._hadoop(checkpoint)
        try:
            return [files.read(address) for address in addresses]
        except HadoopUnavailable:
            if not files.has_ended:
                raise
        return [self._hadoop(checkpoint).read(address) for address in addresses]

    def _hadoop(self, checkpoint: Checkpoint) -> HadoopFiles:
        """The process for these settings; one that has ended is replaced."""
        key = checkpoint.hadoop, checkpoint.jars
        with self._lock:
            files = self._alive(key)
        if isinstance(files, tuple):
            raise HadoopUnavailable(str(files[0]))
        return files

    def _alive(self, key: tuple[tuple[tuple[str, str], ...], str]) -> HadoopFiles | tuple[HadoopUnavailable, float]:
        """Lock held: the process, started if need be; or why there is none, and until when it is not tried again."""
        files = self._files.get(key)
        if isinstance(files, HadoopFiles) and not files.is_alive:
            files.close()
            files = None
        elif isinstance(files, tuple) and time.monotonic() > files[1]:
            files = None
        if files is None:
            try:
                files = HadoopFiles(dict(key[0]), key[1])
            except HadoopUnavailable as error:
                files = error, time.monotonic() + _AGAIN_SECONDS
            self._files[key] = files
        return files

    def _unknown(self, checkpoint: Checkpoint, reason: str) -> bytes:
        if (key := f"{checkpoint.query_id} {checkpoint.location}") not in self._warned:
            self._warned.add(key)
            log.warning(
                "checkpoint_not_read",
                query_id=checkpoint.query_id,
                checkpoint=checkpoint.location,
                reason=f"{reason}; a query that is started on a copy of this checkpoint one batch old will not be "
                "noticed, and its rows of that batch are lost: give the query's own checkpointLocation as an option of "
                "the write, on a file system that the driver can read by the settings spark.hadoop.*",
            )
        return UNKNOWN

    def close(self) -> None:
        """End the processes that were started."""
        for files in self._files.values():
            if isinstance(files, HadoopFiles):
                files.close()
        self._files.clear()


def _is_default_local(checkpoint: Checkpoint) -> bool:
    """Whether paths without a scheme may be of this machine, as far as the settings tell."""
    given = dict(checkpoint.hadoop).get("fs.defaultFS", "file:")
    return checkpoint.files is None and given.startswith("file:")


def _query_id(metadata: bytes) -> str:
    """The query's, in a checkpoint's `metadata` (`{"id": "..."}`)."""
    try:
        return str(json.loads(metadata)["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointUnreadable(f"its metadata is no query's: {error}") from error
