"""A broker's data directory: its owner, the logs in it, and the thread that tidies them.

    lock         locked while a broker has the directory open; see below
    meta         cluster id, broker id and the directory's own id (a sealed document, see checkpoint.py)
    high-watermarks
                 high watermark of each log of which it was set, by folder (a sealed document)
    clean        present only if no broker has the directory open and the last one closed every log properly
    <topic id as 32 hex digits>-<partition>/            one log: segments, indexes, producers, checkpoint
    <topic id>-<partition>.new/                         a log that is being made, to replace a lost one
    <topic id>-<partition>.deleted/                     a deleted log whose files are being unlinked
    <topic id>-<partition>.set-aside-<n>/               what was there before a log was replaced; not read again

The directory's id is written at its first claim and never changes. The states of partitions in ZooKeeper contain it. So
if a log is not here, it is known whether it is missing or was never here.

`lock` has three lines of fixed length, so that they can be written on a full disk: the process id of the broker that
has, or had, the directory open; the machine's boot id at that time; and `lost`, or spaces. After a kill the machine
still has all that was written. After an unclean stop and a boot, unsynced writes may be lost. `lost` says so until the
broker has left the in-sync sets (`settle_loss`): it may be killed before that. An old content of the file, which a
power cut may restore, only makes that loss appear again.

Errors:

- A failed read, write or fdatasync takes the whole directory out of service (`failed`): the page cache may differ from
  the disk, so nothing is read or written until the broker is restarted.
- The removal or replacement of the directory does the same, and a call to the disk that does not return, unless the
  process ends then (`on_stalled`).
- If somebody removes or moves the files of a log, only that log is lost (`on_lost`). Each round of tidying checks for
  this, and a missing file causes a check at once.
- A step that lacks space, a descriptor or memory fails alone and may be retried. So does an error of a single name when
  a log is opened or made, or a log or segment is deleted.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from broker.config import BrokerSettings, TopicSettings
from broker.storage import flushed_acks
from broker.storage.checkpoint import TEMPORARY, is_whole, read_whole, seal, unseal, write_atomic
from broker.storage.disk import Disk, is_of_a_name, passes, storage_error
from broker.storage.disk_errors import DirectoryHealth, DiskErrors
from broker.storage.disk_watch import DiskWatch
from broker.storage.flusher import WAIT_SECONDS_MAX, Flusher
from broker.storage.loader import RESET_NAME, make_empty_log
from broker.storage.log import Log
from broker.storage.segment import LOG_SUFFIX
from broker.storage.services import Services
from broker.storage.steady_clock import SteadyClock
from broker.storage.unlinker import Unlinker
from kafkalog.clock import SYSTEM_CLOCK, Clock
from kafkalog.errors import (
    Closed,
    ClusterMismatch,
    DataDirInUse,
    DiskFull,
    InvalidSetting,
    KafkalogError,
    StorageFailed,
)
from kafkalog.events import get_logger

log = get_logger(__name__)

LOCK_NAME = "lock"
_META = "meta"
_CLEAN = "clean"
_HIGH_WATERMARKS = "high-watermarks"
_HIGH_WATERMARKS_SECONDS = 5.0
_FOLDER = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]*)")
_DELETED = ".deleted"
_NEW = ".new"
_SET_ASIDE = ".set-aside-"
_META_FACTS = {"cluster_id": str, "broker_id": int, "directory_id": str}
_REMOVAL_SECONDS = 1.0
"""The check for a missing file is repeated after this time. By then, a removal of the folder must have reached the
active segment. Otherwise the missing file counts as a failure of the disk."""


def folder_name(topic_id: bytes, partition: int) -> str:
    return f"{topic_id.hex()}-{partition}"


def is_log_folder(name: str) -> bool:
    return _FOLDER.fullmatch(name) is not None


def is_data_directory(path: Path) -> bool:
    """Whether a path is the data directory of a broker. It may have no logs."""
    return (path / _META).is_file()


def _lines(lock: bytes | None) -> tuple[str, str, str]:
    """Process id, boot id and `lost` from the content of the lock file; what is not there is empty."""
    pid, boot_id, lost, *_ = [
        *(line.decode(errors="replace").strip() for line in (lock or b"").split(b"\n")),
        "",
        "",
        "",
    ]
    return pid, boot_id, lost


class LogDirectory:
    """The logs of one data directory. Thread-safe.

    Args:
        path: the directory; created if it is missing.
        disk, clock: the machine's, or a test's.
        producer_batches_remembered, producer_state_max: see `Services`.
        producer_expiration_ms: a producer is forgotten this long after its last append.
        check_interval_ms: interval between the rounds of `tidy`.
        stall_timeout_ms: a call to the disk that takes longer has stalled; 0: none has.
        on_stalled: called then, with the error, on a thread that touches no disk. None: the directory is out of service
            from then on.

    Attributes:
        was_clean: the last broker closed the directory properly, or there are no logs.
        may_have_lost: the machine may have lost unsynced writes: the directory was not closed properly, and the machine
            was booted since, or that is not known. Stays true, over further starts too, until `settle_loss`.
        cluster_id, broker_id: the directory's owner; None until the first `claim`.
        directory_id: the directory's id in ZooKeeper, 32 hex digits. Until the first `claim` each opening makes one up.
        lock_id: identifies the locked file on this machine until the next boot. A broker that holds the lock knows that
            no other process with the same lock_id is alive.
        on_failed: called once, with the error that took the directory out of service.
        on_lost: called with topic id and partition of a log that was closed because its files were removed. It may be
            called on any thread. The caller holds no lock.
        services: shared by the directory's logs, and by other data in a partition's folder.

    Raises:
        DataDirInUse: another process has the directory.
        InvalidSetting: the path is not a directory, and none can be created there.
        StorageFailed, DiskFull: the directory cannot be opened.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        disk: Disk | None = None,
        clock: Clock = SYSTEM_CLOCK,
        producer_batches_remembered: int = BrokerSettings.producer_batches_remembered.default,
        producer_state_max: int = BrokerSettings.producer_state_max.default,
        producer_expiration_ms: int = BrokerSettings.producer_id_expiration_ms.default,
        check_interval_ms: int = BrokerSettings.log_retention_check_interval_ms.default,
        stall_timeout_ms: int = 0,
        on_stalled: Callable[[StorageFailed], object] | None = None,
    ) -> None:
        self.path = Path(path).absolute()
        health = DirectoryHealth(self.path, clock)
        health.on_failed = lambda error: self._have_done(partial(self._report_failure, error), "log-failed")
        health.on_doubt = self._doubt
        disk = disk or Disk()
        self._watch: DiskWatch | None = None
        if stall_timeout_ms:
            self._watch = DiskWatch(disk, self.path, stall_timeout_ms / 1000, on_stalled or health.fail)
            disk = self._watch.disk
        self.services = Services(
            path=self.path,
            disk=disk,
            clock=clock,
            steady_clock=SteadyClock(clock),
            health=health,
            flusher=Flusher(health, clock),
            unlinker=Unlinker(health),
            producer_batches_remembered=producer_batches_remembered,
            producer_state_max=producer_state_max,
        )
        self.disk = self.services.disk
        self._health = health
        self._unlinker = self.services.unlinker
        self._producer_expiration_us = producer_expiration_ms * 1000
        self._check_interval_seconds = min(check_interval_ms / 1000, WAIT_SECONDS_MAX)
        self.on_failed: Callable[[StorageFailed], None] = lambda error: None
        self.on_lost: Callable[[bytes, int], None] = lambda topic_id, partition: None
        self.cluster_id: str | None = None
        self.broker_id: int | None = None
        self.directory_id = uuid.uuid4().hex
        self._lock = threading.Lock()  # guards the attributes up to _high_watermarks; taken before any log's locks
        self._logs: dict[tuple[bytes, int], Log] = {}
        self._missing: set[tuple[bytes, int]] = set()  # found by `note_if_missing`, and all of _untrusted
        self._untrusted: set[tuple[bytes, int]] = set()  # removed while open, or replaced and not trusted yet
        self._closed = False
        self._half_opened: set[tuple[bytes, int]] = set()  # opening failed, perhaps after names in the folder changed
        self._unsynced = False  # a folder was made, and its name may not be durable
        self._high_watermarks: dict[str, int] = {}  # by folder; as read, or as looked up for the last save
        self._watermarks_lock = threading.Lock()  # guards _saved_high_watermarks and their file; taken before _lock
        self._saved_high_watermarks: dict[str, int] = {}
        self._tidier: threading.Thread | None = None
        self._watermarks_saver: threading.Thread | None = None
        self._changed = threading.Condition()  # guards the attributes below; taken after any log's locks
        self._doubted: set[Path] = set()  # folders of logs for which a check runs
        self._stopping = False
        self._chores: deque[Callable[[], object]] = deque()  # calls for which no thread could be started
        if self._watch is not None:
            self._watch.start()
        try:
            self._open()
        except BaseException as error:
            self._stop_watch()
            if isinstance(error, OSError):
                raise storage_error(self.path, error, "opening it") from error
            raise

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def _open(self) -> None:
        try:
            self.disk.make_dirs(self.path)
        except OSError as error:
            if is_of_a_name(error):  # such as a file of that name, or no permission; not a failure of the disk
                reason = f"it is not a directory and cannot be created: {error.strerror}"
                raise InvalidSetting(name="log.dir", value=str(self.path), reason=reason) from None
            raise
        lock_path = self.path / LOCK_NAME
        lock_fd = self.disk.lock(lock_path)
        if lock_fd is None:
            raise DataDirInUse(directory=str(self.path), pid=_lines(read_whole(self.disk, lock_path))[0] or "unknown")
        self._lock_fd = lock_fd
        try:
            self.lock_id = self.disk.identity(lock_fd)
            self._read_meta()
            self._read_high_watermarks()
            names = self.disk.names(self.path)
            if _CLEAN not in names:
                self.disk.sync_dir(self.path)  # a killed process may not have synced the names that it made
            for name in names:
                if name in (_META + TEMPORARY, _CLEAN + TEMPORARY, _HIGH_WATERMARKS + TEMPORARY):
                    self.disk.unlink(self.path / name)
                elif is_log_folder(name.removesuffix(_NEW)) and name.endswith(_NEW):
                    self._remove_folder(self.path / name)
                elif is_log_folder(name.removesuffix(_DELETED)) and name.endswith(_DELETED):
                    self._unlinker.later(name, partial(self._remove_deleted, self.path / name))
            self.was_clean = _CLEAN in names or not self.existing()
            _, boot_id, lost = _lines(read_whole(self.disk, lock_path))
            self.may_have_lost = bool(lost) or (not self.was_clean and boot_id != self.disk.boot_id())
            self._write_lock()
            if self.may_have_lost:  # otherwise a power cut restores an older boot id at worst
                self.disk.sync(lock_fd)
            if _CLEAN in names:
                self.disk.unlink(self.path / _CLEAN)
                self.disk.sync_dir(self.path)
        except BaseException:
            self.disk.close(lock_fd)
            raise

    def _write_lock(self) -> None:
        facts = os.getpid(), self.disk.boot_id().encode(), b"lost" if self.may_have_lost else b""
        self.disk.write(self._lock_fd, [b"%-19d\n%-36s\n%-4s\n" % facts], 0)

    def settle_loss(self) -> None:
        """Note that the broker has done what follows from `may_have_lost`: its replicas have left the in-sync sets.

        Raises:
            StorageFailed: the directory is out of service from now on.
        """
        with self._lock:
            self._check_usable()
            if self.may_have_lost:
                self.may_have_lost = False
                try:
                    self._write_lock()
                except OSError as error:
                    DiskErrors(self._health, "logs").fail(error, "writing the lock file")

    def _read_high_watermarks(self) -> None:
        data = read_whole(self.disk, self.path / _HIGH_WATERMARKS)
        facts = unseal(data or b"")
        if facts is None or not all(isinstance(offset, int) for offset in facts.values()):
            if data is not None:
                log.warning("high_watermarks_damaged", directory=str(self.path))
            return
        self._high_watermarks, self._saved_high_watermarks = dict(facts), dict(facts)

    def _read_meta(self) -> None:
        data = read_whole(self.disk, self.path / _META)
        if data is None:
            return
        facts = unseal(data)
        if facts is None or any(not isinstance(facts.get(name), kind) for name, kind in _META_FACTS.items()):
            raise StorageFailed(directory=str(self.path), reason=f"{self.path / _META} is damaged")
        self.cluster_id, self.broker_id = facts["cluster_id"], facts["broker_id"]
        self.directory_id = facts["directory_id"]

    def check_owner(self, cluster_id: str | None, broker_id: int) -> None:
        """Check that the directory has no other owner. Writes nothing.

        Args:
            cluster_id: None: a cluster that does not exist yet.

        Raises:
            ClusterMismatch: the directory belongs to another cluster or broker.
            StorageFailed: the directory has logs, but its `meta` is missing.
        """
        if self.cluster_id is not None:
            owners = (
                (f"broker {self.broker_id}", f"broker {broker_id}", "broker.id"),
                (
                    f"cluster {self.cluster_id}",
                    "a new cluster" if cluster_id is None else f"cluster {cluster_id}",
                    "zookeeper.connect (its addresses and its chroot)",
                ),
            )
            differ = [owner for owner in owners if owner[0] != owner[1]]
            if differ:
                theirs, ours, settings = zip(*differ, strict=True)
                raise ClusterMismatch(
                    directory=str(self.path),
                    expected=" of ".join(theirs),
                    actual=" of ".join(ours),
                    settings=" and ".join(settings),
                )
        elif self.existing():  # impossible after a crash: meta is written before the first log is made
            reason = f"it holds logs, but {self.path / _META}, which names their broker, is missing: put it back"
            raise StorageFailed(directory=str(self.path), reason=reason)

    def claim(self, cluster_id: str, broker_id: int) -> None:
        """Set the directory's owner. The first call writes it to `meta`, with the directory's id.

        Raises:
            ClusterMismatch: see `check_owner`.
            StorageFailed: see there; or `meta` cannot be written.
            DiskFull: `meta` cannot be written.
        """
        self.check_owner(cluster_id, broker_id)
        if self.cluster_id is not None:
            return
        facts = {"cluster_id": cluster_id, "broker_id": broker_id, "directory_id": self.directory_id}
        try:
            write_atomic(self.disk, self.path / _META, seal(facts))
        except OSError as error:
            raise storage_error(self.path, error, "writing meta") from error
        self.cluster_id, self.broker_id = cluster_id, broker_id

    # --- logs ----------------------------------------------------------------------------------------------------

    def existing(self) -> list[tuple[bytes, int]]:
        """(topic id, partition) of every log that has a folder in this directory."""
        matches = (_FOLDER.fullmatch(name) for name in self.disk.names(self.path))
        return [(bytes.fromhex(match[1]), int(match[2])) for match in matches if match]

    def has_log(self, topic_id: bytes, partition: int) -> bool:
        """Whether a log is here: its folder has a segment named `.log`, as every log does after its first opening, or a
        reset is to make one."""
        try:
            names = self.disk.names(self.path / folder_name(topic_id, partition))
        except FileNotFoundError:
            return False
        except OSError as error:
            DiskErrors(self._health, folder_name(topic_id, partition)).refuse_to_open(error, "looking up the log")
        return any(name.endswith(LOG_SUFFIX) or name == RESET_NAME for name in names)

    def acks_were_flushed(self, topic_id: bytes, partition: int) -> bool:
        """Whether all records that were acknowledged here were durable before; see `flushed_acks.py`."""
        try:
            return flushed_acks.is_noted(self.disk, self.path / folder_name(topic_id, partition))
        except OSError as error:
            DiskErrors(self._health, folder_name(topic_id, partition)).refuse_to_open(error, "looking up the log")

    def note_if_missing(self, topic_id: bytes, partition: int) -> bool:
        """Check for a log that should be here.

        Returns whether the log is missing, was removed while it was open, or is an empty replacement before
        `trust_log`. The directory is then not marked clean when it is closed, unless the log is trusted or removed
        before: somebody may put the log back, and its state is then unknown.
        """
        with self._lock:
            if (topic_id, partition) not in self._untrusted and self.has_log(topic_id, partition):
                return False
            self._missing.add((topic_id, partition))
            return True

    def replace_log(self, topic_id: bytes, partition: int, label: str, start_offset: int) -> None:
        """Replace a lost log by an empty one, atomically. An existing folder of the log is kept under another name.

        The log counts as lost until `trust_log`, so that this call can be repeated.

        Args:
            label: the partition's name, such as `flights-0`.
            start_offset: the offset of the first record to be appended.
        """
        folder = self.path / folder_name(topic_id, partition)
        new = folder.with_name(folder.name + _NEW)
        with self._lock:
            self._check_usable()
            self._missing.add((topic_id, partition))
            self._untrusted.add((topic_id, partition))
            self._high_watermarks.pop(folder.name, None)
            opened = self._logs.pop((topic_id, partition), None)
            if opened is not None:  # another broker replaced it while this one had it open
                opened.close(clean=False)
            try:
                names = self.disk.names(self.path)
                if new.name in names:
                    self._remove_folder(new)
                self.disk.make_dir(new)
                make_empty_log(self.disk, new, label, start_offset)
                if folder.name in names:
                    free = (f"{folder.name}{_SET_ASIDE}{number}" for number in itertools.count(1))
                    aside = self.path / next(name for name in free if name not in names)
                    self.disk.rename(folder, aside)
                    self.disk.sync_dir(self.path)
                    log.warning("folder_set_aside", folder=folder.name, kept_as=str(aside))
                self.disk.rename(new, folder)
                self.disk.sync_dir(self.path)
            except OSError as error:
                DiskErrors(self._health, folder.name).refuse_to_open(error, "replacing the log")

    def trust_log(self, topic_id: bytes, partition: int) -> None:
        """Accept the log that `replace_log` made as the partition's."""
        with self._lock:
            self._forget_missing((topic_id, partition))

    def open_log(
        self, topic_id: bytes, partition: int, label: str, settings: TopicSettings, leader_epoch: int | None
    ) -> Log:
        """Open the log of a partition; create it if there is none. If it is open already, only its settings are
        updated.

        Args:
            label: the partition's name for errors and events, such as `flights-0`.
            settings: of the topic.
            leader_epoch: the epoch in which this broker leads the partition; None if it does not. After an unclean stop
                the caller must raise it.
        """
        assert len(topic_id) == 16
        key = topic_id, partition
        with self._lock:
            self._check_usable()
            found = self._logs.get(key)
            if found is not None:
                if found.settings.given() != settings.given():
                    found.update_settings(settings)
                return found
            self._make_folders([folder_name(topic_id, partition)])
            folder = self.path / folder_name(topic_id, partition)
            self._sync_names(key, folder, label)
            self._half_opened.add(key)
            opened = self._logs[key] = Log(self.services, folder, label, settings, leader_epoch)
            self._half_opened.discard(key)
            return opened

    def make_folders(self, topic_id: bytes, partitions: Iterable[int]) -> None:
        """Make the missing folders of logs that are to be opened, with one sync for all of them."""
        with self._lock:
            self._check_usable()
            self._make_folders([folder_name(topic_id, partition) for partition in partitions])

    def _make_folders(self, names: Iterable[str]) -> None:
        try:
            for name in names:
                try:
                    self.disk.make_dir(self.path / name)
                    self._unsynced = True
                except FileExistsError:
                    pass
            if self._unsynced:
                self.disk.sync_dir(self.path)
                self._unsynced = False
        except OSError as error:
            DiskErrors(self._health, "logs").refuse_to_open(error, "making folders")

    def _sync_names(self, key: tuple[bytes, int], folder: Path, label: str) -> None:
        """Make the names in a log's folder durable, if an unclean stop or a failed opening may have prevented it.
        Opening relies on these names; then records are appended and segments deleted."""
        try:
            if (not self.was_clean or key in self._half_opened) and self.disk.names(folder):
                self.disk.sync_dir(folder)
        except OSError as error:
            DiskErrors(self._health, label).refuse_to_open(error, "opening the log")

    def _check_usable(self) -> None:
        self._health.check()
        if self._closed:
            raise Closed(what=f"log directory {self.path}")

    def remove_log(self, topic_id: bytes, partition: int) -> None:
        """Close a log and delete it. If there is none, do nothing.

        The log is deleted when its folder is renamed. The unlinker's thread then unlinks the files, because an unlink
        of 1 GiB takes 50 to 300 ms. The next start unlinks what is left after a stop.
        """
        with self._lock:
            self._check_usable()
            self._forget_missing((topic_id, partition))
            self._high_watermarks.pop(folder_name(topic_id, partition), None)
            opened = self._logs.pop((topic_id, partition), None)
            if opened is not None:
                opened.close(clean=False)
            folder = self.path / folder_name(topic_id, partition)
            gone = folder.with_name(folder.name + _DELETED)
            try:
                self.disk.rename(folder, gone)
                self.disk.sync_dir(self.path)
            except FileNotFoundError:
                return
            except OSError as error:
                DiskErrors(self._health, folder.name).refuse_to_open(error, "deleting the log")
        self._unlinker.soon(gone.name, partial(self._remove_deleted, gone))

    def _remove_deleted(self, gone: Path) -> bool:
        """Delete a folder that was renamed for deletion, unless `close` interrupts this. Returns False, because no
        further call is needed (`Unlinker.soon`)."""
        try:
            if not self._remove_folder(gone):
                return False
        except FileNotFoundError:
            pass  # another process removed it
        except OSError as error:
            DiskErrors(self._health, gone.name).refuse_to_open(error, "deleting the log")
        log.info("log_deleted", folder=gone.stem)
        return False

    def _forget_missing(self, key: tuple[bytes, int]) -> None:
        self._missing.discard(key)
        self._untrusted.discard(key)

    def _remove_folder(self, folder: Path) -> bool:
        """Delete a folder and its content. Returns False if `close` interrupted this."""
        for name in self.disk.names(folder):
            if self._stopping:
                return False
            try:
                self.disk.unlink(folder / name)
            except IsADirectoryError:
                if not self._remove_folder(folder / name):
                    return False
        self.disk.remove_dir(folder)
        return True

    def logs(self) -> list[Log]:
        """The open logs."""
        with self._lock:
            return list(self._logs.values())

    # --- high watermarks -----------------------------------------------------------------------------------------

    def saved_high_watermark(self, topic_id: bytes, partition: int) -> int:
        """The high watermark of a log as it was saved last: at most the end offset, if the log is open; 0 if it is not
        known."""
        with self._lock:
            saved = self._high_watermarks.get(folder_name(topic_id, partition), 0)
            opened = self._logs.get((topic_id, partition))
            return saved if opened is None else min(saved, opened.end_offset)

    def save_high_watermarks(self) -> None:
        """Save the high watermarks of the logs of which it was set, if one has changed. A thread does so every 5 s, and
        a clean stop.

        Raises:
            DiskFull: the next call tries again.
            StorageFailed: the directory is out of service.
        """
        with self._watermarks_lock:
            with self._lock:
                for key, opened in self._logs.items():
                    if opened.has_high_watermark:
                        self._high_watermarks[folder_name(*key)] = opened.high_watermark
                found = dict(self._high_watermarks)
            if found == self._saved_high_watermarks:
                return
            self._health.check()
            try:
                write_atomic(self.disk, self.path / _HIGH_WATERMARKS, seal(found))
            except OSError as error:
                DiskErrors(self._health, "logs").refuse(error, "saving the high watermarks")
            self._saved_high_watermarks = found

    def check_files(self) -> None:
        """Write `meta` and the high watermarks again if their files are damaged or missing.

        Raises:
            DiskFull, StorageFailed.
        """
        self._health.check()
        try:
            with self._watermarks_lock:
                found = is_whole(read_whole(self.disk, self.path / _HIGH_WATERMARKS))
                damaged = bool(self._saved_high_watermarks) and not found
                if damaged:
                    self._saved_high_watermarks = {}
            if self.cluster_id is not None and not is_whole(read_whole(self.disk, self.path / _META)):
                facts = {name: getattr(self, name) for name in _META_FACTS}
                write_atomic(self.disk, self.path / _META, seal(facts))
                log.warning("file_rebuilt", directory=str(self.path), file=_META)
        except OSError as error:
            DiskErrors(self._health, "logs").refuse(error, "checking files")
        if damaged:
            self.save_high_watermarks()
            log.warning("file_rebuilt", directory=str(self.path), file=_HIGH_WATERMARKS)

    def _save_watermarks_loop(self) -> None:
        while not self._wait_stopping(_HIGH_WATERMARKS_SECONDS):
            try:
                self.save_high_watermarks()
            except DiskFull as error:
                self._health.log_full(error, _HIGH_WATERMARKS)
            except KafkalogError:
                return  # the directory is out of service
            except Exception:
                log.exception("high_watermarks_not_saved", directory=str(self.path))

    # --- failing -------------------------------------------------------------------------------------------------

    @property
    def failed(self) -> StorageFailed | None:
        """The error that took the directory out of service; None while it is in service."""
        return self._health.failed

    @property
    def is_full(self) -> bool:
        """Whether a step lacked disk space in the last minute."""
        return self._health.is_full

    def _doubt(self, folder: Path, error: StorageFailed) -> None:
        """Start a check for a partition's log of which a file was missing, in another thread. If the log's files are in
        place, the directory fails with the error."""
        with self._changed:
            if folder in self._doubted or self.failed is not None:
                return
            self._doubted.add(folder)
        self._have_done(partial(self._settle_doubt, folder, error), "log-missing")

    def _have_done(self, call: Callable[[], object], name: str) -> None:
        """Call a function in a new thread, because the caller may hold a log's locks. If no thread can be started, the
        tidying thread calls it."""
        try:
            threading.Thread(target=call, name=name, daemon=True).start()
        except RuntimeError as error:
            log.warning("thread_not_started", name=name, reason=str(error))
            with self._changed:
                self._chores.append(call)
                self._changed.notify_all()

    def _settle_doubt(self, folder: Path, error: StorageFailed) -> None:
        try:
            if not self._check_removed(folder):
                self._wait_stopping(_REMOVAL_SECONDS)
                if not self._check_removed(folder):
                    self._health.fail(error)
        except KafkalogError:  # the check failed
            self._health.fail(error)
        finally:
            with self._changed:
                self._doubted.discard(folder)

    def _check_removed(self, folder: Path) -> bool:
        """Check for the log of a folder. Returns whether it, or the whole directory, was removed or closed. A removed
        log is lost from now on."""
        with self._lock:
            if self._closed or not self._check_in_place():
                return True
            doubted = [(key, opened) for key, opened in self._logs.items() if opened.directory == folder]
        return all(self._lose_if_gone(key, opened) for key, opened in doubted)

    def _check_in_place(self) -> bool:
        """Check that the opened directory is still at its path. If it is not, it is out of service from now on. The
        caller holds the lock, or is a thread that `close` waits for."""
        lock = self.path / LOCK_NAME
        try:
            if self.disk.stands_at(self._lock_fd, lock):
                return True
            reason = (
                f"{lock} is no longer the file that this broker has locked: the directory was removed, emptied or "
                "replaced while it was in use"
            )
        except OSError as error:
            if is_of_a_name(error) or passes(error):
                return True  # this error is no evidence that the directory is gone
            reason = f"looking for {lock}: {error.strerror or error}"
        self._health.fail(StorageFailed(directory=str(self.path), reason=reason))
        return False

    def _lose_if_gone(self, key: tuple[bytes, int], opened: Log) -> bool:
        """If the files of an open log were removed, close it: it is lost from now on. Returns False if the log is open
        and its files are in place."""
        if not opened.is_gone():
            return False
        with self._lock:
            # A deletion or replacement removes it from _logs before it touches a file, and holds the lock meanwhile.
            if self._closed or self._logs.get(key) is not opened:
                return True
            if not self._check_in_place():
                return True  # the whole directory was moved or removed; it may be put back, so no log is lost
            del self._logs[key]
            self._missing.add(key)
            self._untrusted.add(key)
            opened.close(clean=False)
        self.on_lost(*key)
        return True

    def _report_failure(self, error: StorageFailed) -> None:
        """Call `on_failed`, and wake the threads that wait for a flush."""
        self.on_failed(error)
        for opened in self.logs():
            opened.on_flushed()

    # --- threads -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the background threads. They first do the work that was submitted before."""
        assert self._tidier is None, "started already"
        self.services.flusher.start()
        self._unlinker.start()
        self._tidier = threading.Thread(target=self._tidy_loop, name="log-tidy", daemon=True)
        self._tidier.start()
        self._watermarks_saver = threading.Thread(target=self._save_watermarks_loop, name="log-watermarks", daemon=True)
        self._watermarks_saver.start()

    def _tidy_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._chores, self._check_interval_seconds)
                if self._stopping:
                    return
                chore = self._chores.popleft() if self._chores else self.tidy
            try:
                chore()
            except Exception:
                log.exception("tidy_failed", directory=str(self.path))

    def _wait_stopping(self, seconds: float) -> bool:
        """Wait for `close`, at most so long; returns whether it was called."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, seconds)

    def tidy(self) -> None:
        """Do one round over all logs. For each log: check that its files are in place, roll it by age, apply retention,
        forget silent producers, write a checkpoint."""
        if self.failed is not None or not self._check_in_place():
            return
        with self._lock:
            logs = list(self._logs.items())
        for key, opened in logs:
            try:
                if self._lose_if_gone(key, opened):
                    continue
                opened.roll_if_old()
                opened.apply_retention()
                opened.forget_silent_producers(self.services.steady_clock.now_us() - self._producer_expiration_us)
                opened.checkpoint()
                opened.note_flushed_acks()
            except (StorageFailed, Closed):
                continue
            except DiskFull as error:
                self._health.log_full(error, opened.label)
            except KafkalogError as error:
                log.warning("tidy_failed", partition=opened.label, reason=str(error))
            except Exception:
                log.exception("tidy_failed", partition=opened.label)

    def close(self, clean: bool = True) -> None:
        """Stop the threads, close every log, and release the directory.

        Args:
            clean: flush and save everything first, so that the next start has nothing to recover.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            logs = list(self._logs.items())
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._unlinker.stop()
        self.services.flusher.stop()
        for thread in (self._tidier, self._watermarks_saver):
            if thread is not None:
                thread.join()
        all_saved = clean or not logs  # without an open log, the directory is as it was found
        for _, opened in logs:
            try:
                opened.close(clean)
            except KafkalogError as error:
                all_saved = False
                log.warning("log_not_saved", partition=opened.label, reason=str(error))
        if clean and self.failed is None:
            try:
                self.save_high_watermarks()
            except KafkalogError as error:
                log.warning("high_watermarks_not_saved", directory=str(self.path), reason=str(error))
        try:
            # A log that was not opened is clean only if the whole directory was clean at the start.
            untouched = {*self.existing()} - {key for key, _ in logs}
            if all_saved and not self._missing and self.failed is None and (self.was_clean or not untouched):
                write_atomic(self.disk, self.path / _CLEAN, b"")
        except OSError as error:
            log.warning("clean_stop_not_marked", directory=str(self.path), reason=str(error))
        finally:
            with self._lock, contextlib.suppress(OSError):
                self.disk.close(self._lock_fd)
            self._stop_watch()
