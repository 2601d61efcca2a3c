"""A broker's data directory: whose it is, and the logs in it, with the threads that flush and tidy them.

    lock         held while a broker has the directory; the holder's process id is in it
    meta         cluster id, broker id and the directory's own id (a sealed document, see checkpoint.py)
    clean        there only while no broker has it open and the last one closed every log properly
    <topic id as 32 hex digits>-<partition>/            one log: segments, indexes, producers, checkpoint
    <topic id>-<partition>.new/                         being made, in the place of one that was lost
    <topic id>-<partition>.deleted/                     on its way out
    <topic id>-<partition>.set-aside-<n>/               left where a new one was made; nothing here looks at it again

The directory's id is made at its first claim and never changes. The states of partitions in ZooKeeper name it, so that
a log that is missing here is known to be missing, and is not taken for one that was never there.

A failed read, write or fdatasync takes the whole directory out of service (`failed`): the page cache no longer tells
the truth, so nothing of it is read or written until the broker starts anew. So does its removal, or another directory
in its place. A log whose files somebody removed or moved away is lost alone (`on_lost`): each round of tidying looks
for that, and whoever does not find a file has it looked for at once. What lacks space to be written, or a
descriptor or memory to be opened, fails alone and may be tried again; and so does what concerns one name alone, where
logs are opened and made, and where logs and segments are deleted.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from broker.storage.checkpoint import TEMPORARY, read_whole, seal, unseal, write_atomic
from broker.storage.disk import Disk, is_of_a_name, passes, storage_error
from broker.storage.faults import Faults
from broker.storage.home import Flushable
from broker.storage.log import Log
from broker.storage.opening import make_empty_log
from broker.storage.segment import LOG_SUFFIX
from broker.storage.staging import STAGING
from broker.storage.steady_clock import SteadyClock
from kafkalog.clock import SYSTEM_CLOCK, Clock
from kafkalog.config import Values
from kafkalog.errors import (
    Closed,
    ClusterMismatch,
    DataDirInUse,
    DiskFull,
    InvalidSetting,
    KafkalogError,
    OutOfFiles,
    StorageFailed,
)
from kafkalog.events import get_logger

log = get_logger(__name__)

_LOCK = "lock"
_META = "meta"
_CLEAN = "clean"
_FOLDER = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]*)")
_DELETED = ".deleted"
_NEW = ".new"
_SET_ASIDE = ".set-aside-"
_META_FACTS = {"cluster_id": str, "broker_id": int, "directory_id": str}
_FLUSHERS = 4
"""Threads for group commit. The file system joins their fdatasyncs of several partitions into one journal commit."""
_WAIT_SECONDS_MAX = 86_400.0
"""Of one wait: the system takes no longer one than some weeks, and settings may be any number of milliseconds."""
_REMOVAL_SECONDS = 1.0
"""How long the removal of a folder is given to get to its last file, before a missing one is the disk's fault."""
_FULL_LOGGED_EVERY_SECONDS = 60.0
_FULL_RETRY_SECONDS = 1.0
_REMOVAL_RETRY_SECONDS = 1.0


@dataclass(order=True, slots=True)
class _Deadline:
    """When a log is to be flushed. `log` None: not any more."""

    at: float
    ticket: int
    log: Flushable | None = field(compare=False)


def folder_name(topic_id: bytes, partition: int) -> str:
    return f"{topic_id.hex()}-{partition}"


def is_log_folder(name: str) -> bool:
    return _FOLDER.fullmatch(name) is not None


def is_data_directory(path: Path) -> bool:
    """Whether a broker has or had its logs there; there may be none."""
    return (path / _META).is_file()


class LogDirectory:
    """The logs of one data directory. Thread-safe.

    Args:
        path: made if it is missing.
        disk, clock: what stands for the machine.
        producer_batches_remembered, producer_state_max: of each producer, and of each log; see `Producers`.
        producer_expiration_ms: silent producers are forgotten after that long.
        check_interval_ms: how often retention, rolls by age and checkpoints are looked at.

    Attributes:
        was_clean: the last broker closed it properly, or there was none.
        cluster_id, broker_id: whose it is; None until `claim` was called for the first time.
        directory_id: what it is called in ZooKeeper, 32 hex digits; None until then, too.
        lock_id: names the file that is locked while it is open, on this machine since it was booted. A broker that has
            the lock knows that no other process that names the same file is alive.
        failed: why it is out of service; None while it serves.
        on_failed: called once with the error that took it out of service.
        on_lost: called with topic id and partition of a log that is closed since somebody removed its files; from any
            thread, with no lock held.
        steady_clock: the time by which something is deleted or forgotten.

    Raises:
        DataDirInUse: another process has it.
        InvalidSetting: no directory can be or be made there.
        StorageFailed, DiskFull: it cannot be opened.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        disk: Disk | None = None,
        clock: Clock = SYSTEM_CLOCK,
        producer_batches_remembered: int = 128,
        producer_state_max: int = 10_000,
        producer_expiration_ms: int = 86_400_000,
        check_interval_ms: int = 60_000,
    ) -> None:
        self.path = Path(path).absolute()
        self.disk = disk or Disk()
        self.clock = clock
        self.steady_clock: Clock = SteadyClock(clock)
        self.producer_batches_remembered = producer_batches_remembered
        self.producer_state_max = producer_state_max
        self.producer_expiration_ms = producer_expiration_ms
        self.check_interval_ms = check_interval_ms
        self.failed: StorageFailed | None = None
        self.on_failed: Callable[[StorageFailed], None] = lambda error: None
        self.on_lost: Callable[[bytes, int], None] = lambda topic_id, partition: None
        self.cluster_id: str | None = None
        self.broker_id: int | None = None
        self.directory_id: str | None = None
        self._lock = threading.Lock()  # guards the sets below, _logs, _closed, _unsynced; before any log's locks
        self._telling = threading.Lock()  # guards failed, _full_logged_at and _doubted; after all other locks
        self._logs: dict[tuple[bytes, int], Log] = {}
        self._missing: set[tuple[bytes, int]] = set()  # what `note_if_missing` found, and _untrusted
        self._untrusted: set[tuple[bytes, int]] = set()  # gone while open, or made anew and `trust_log` is yet to come
        self._doubted: set[str] = set()  # labels of logs that are being looked for
        self._closed = False
        self._full_at = float("-inf")
        self._full_logged_at: dict[str, float] = {}  # by event
        self._half_opened: set[tuple[bytes, int]] = set()  # opening failed, perhaps after names in the folder changed
        self._unsynced = False  # a folder was made, and its name may not outlive a power cut
        self._threads: list[threading.Thread] = []
        self._to_flush: queue.SimpleQueue[Flushable | None] = queue.SimpleQueue()
        self._to_remove: queue.SimpleQueue[tuple[str, Callable[[], bool]] | None] = queue.SimpleQueue()
        self._asked_to_remove: set[tuple[str, Callable[[], bool]]] = set()  # what is in it
        self._timer = threading.Condition()  # guards _timed, _deadlines, _stopping and _chores; after any log's locks
        self._timed: dict[Flushable, _Deadline] = {}
        self._deadlines: list[_Deadline] = []  # a heap: those of _timed, and some without a log that passed early
        self._ticket = itertools.count()
        self._stopping = False
        self._chores: deque[Callable[[], object]] = deque()  # what no other thread could be started for
        try:
            self._open()
        except OSError as error:
            raise storage_error(self.path, error, "opening it") from error

    def _open(self) -> None:
        try:
            self.disk.make_dirs(self.path)
        except OSError as error:
            if is_of_a_name(error):  # a file has its name, or one above; the disk is not to blame
                reason = f"it is no directory and cannot be made one: {error.strerror}"
                raise InvalidSetting(name="log.dir", value=str(self.path), reason=reason) from None
            raise
        lock_path = self.path / _LOCK
        lock_fd = self.disk.lock(lock_path)
        if lock_fd is None:
            holder = (read_whole(self.disk, lock_path) or b"").decode(errors="replace").strip()
            raise DataDirInUse(directory=str(self.path), pid=holder or "unknown")
        self._lock_fd = lock_fd
        try:
            self.lock_id = self.disk.identity(lock_fd)
            self.disk.write(lock_fd, [b"%-19d\n" % os.getpid()], 0)  # of fixed length: needs no room on a full disk
            self._read_meta()
            names = self.disk.names(self.path)
            if _CLEAN not in names:
                self.disk.sync_dir(self.path)  # a killed process may not have lived to sync the names that it made
            for name in names:
                if name in (_META + TEMPORARY, _CLEAN + TEMPORARY):
                    self.disk.unlink(self.path / name)
                elif is_log_folder(name.removesuffix(_NEW)) and name.endswith(_NEW):
                    self._remove_folder(self.path / name)
                elif is_log_folder(name.removesuffix(_DELETED)) and name.endswith(_DELETED):
                    self._put_to_remove((name, partial(self._remove_deleted, self.path / name)))
            self.was_clean = _CLEAN in names or not self.existing()
            if _CLEAN in names:
                self.disk.unlink(self.path / _CLEAN)
                self.disk.sync_dir(self.path)
        except BaseException:
            self.disk.close(lock_fd)
            raise

    def _read_meta(self) -> None:
        data = read_whole(self.disk, self.path / _META)
        if data is None:
            return
        facts = unseal(data)
        if facts is None or any(not isinstance(facts.get(name), kind) for name, kind in _META_FACTS.items()):
            raise StorageFailed(directory=str(self.path), reason=f"{self.path / _META} is damaged")
        self.cluster_id, self.broker_id = facts["cluster_id"], facts["broker_id"]
        self.directory_id = facts["directory_id"]

    def claim(self, cluster_id: str, broker_id: int) -> None:
        """Say whose the directory is; the first call writes it down, and gives the directory its id.

        Raises:
            ClusterMismatch: it is another's.
            StorageFailed: it has logs, but what says whose they are is gone.
        """
        ours = f"broker {broker_id} of cluster {cluster_id}"
        if self.cluster_id is not None:
            if (self.cluster_id, self.broker_id) != (cluster_id, broker_id):
                theirs = f"broker {self.broker_id} of cluster {self.cluster_id}"
                raise ClusterMismatch(directory=str(self.path), expected=theirs, actual=ours)
            return
        if self.existing():  # never so after a crash: meta is written before the first log is made
            reason = f"it holds logs, but {self.path / _META}, which says whose they are, is gone: put it back"
            raise StorageFailed(directory=str(self.path), reason=reason)
        directory_id = uuid.uuid4().hex
        facts = {"cluster_id": cluster_id, "broker_id": broker_id, "directory_id": directory_id}
        try:
            write_atomic(self.disk, self.path / _META, seal(facts))
        except OSError as error:
            raise storage_error(self.path, error, "writing meta") from error
        self.cluster_id, self.broker_id, self.directory_id = cluster_id, broker_id, directory_id

    # --- logs ----------------------------------------------------------------------------------------------------

    def existing(self) -> list[tuple[bytes, int]]:
        """(topic id, partition) of every log that has a folder here."""
        matches = (_FOLDER.fullmatch(name) for name in self.disk.names(self.path))
        return [(bytes.fromhex(match[1]), int(match[2])) for match in matches if match]

    def has_log(self, topic_id: bytes, partition: int) -> bool:
        """Whether a log stands here: a folder with a segment in it, which every log has from its first opening on."""
        try:
            names = self.disk.names(self.path / folder_name(topic_id, partition))
        except FileNotFoundError:
            return False
        except OSError as error:
            Faults(self, folder_name(topic_id, partition)).refuse_to_open(error, "looking for the log")
        return any(name.endswith(LOG_SUFFIX) for name in names)

    def note_if_missing(self, topic_id: bytes, partition: int) -> bool:
        """Look for a log that should stand here; whether it does not, or did not while it was open, or is an empty one
        in its place that nobody trusts yet. The directory is then not marked clean at the end, unless the log is
        replaced or deleted: nobody knows how one was left that may be put back."""
        with self._lock:
            if (topic_id, partition) not in self._untrusted and self.has_log(topic_id, partition):
                return False
            self._missing.add((topic_id, partition))
            return True

    def replace_log(self, topic_id: bytes, partition: int, label: str, start_offset: int) -> None:
        """Make an empty log in the place of a lost one; whole or not at all, whatever stops it. It counts as lost until
        `trust_log`, so that this can be done again.

        A folder that has its name is kept under another one.

        Args:
            label: the partition's name, such as `flights-0`.
            start_offset: of its first record.
        """
        folder = self.path / folder_name(topic_id, partition)
        new = folder.with_name(folder.name + _NEW)
        with self._lock:
            self._check_usable()
            self._missing.add((topic_id, partition))
            self._untrusted.add((topic_id, partition))
            opened = self._logs.pop((topic_id, partition), None)
            if opened is not None:  # another broker took it over while this one had it open
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
                Faults(self, folder.name).refuse_to_open(error, "making the log anew")

    def trust_log(self, topic_id: bytes, partition: int) -> None:
        """What `replace_log` made is the partition's log from now on."""
        with self._lock:
            self._forget_missing((topic_id, partition))

    def open_log(self, topic_id: bytes, partition: int, label: str, settings: Values, leader_epoch: int) -> Log:
        """The log of a partition, made if there is none; open already, the same one.

        Args:
            label: the partition as errors name it, such as `flights-0`.
            settings: of the topic.
            leader_epoch: to stamp; to be raised by the caller after an unclean stop.
        """
        assert len(topic_id) == 16
        key = topic_id, partition
        with self._lock:
            self._check_usable()
            found = self._logs.get(key)
            if found is not None:
                return found
            self._make_folders([folder_name(topic_id, partition)])
            folder = self.path / folder_name(topic_id, partition)
            self._sync_names(key, folder, label)
            self._half_opened.add(key)
            opened = self._logs[key] = Log(self, folder, label, settings, leader_epoch)
            self._half_opened.discard(key)
            return opened

    def make_folders(self, topic_id: bytes, partitions: Iterable[int]) -> None:
        """Make the folders of logs that are to be opened, where they are missing: one sync for all of them."""
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
            Faults(self, "logs").refuse_to_open(error, "making folders")

    def _sync_names(self, key: tuple[bytes, int], folder: Path, label: str) -> None:
        """Make the names in a log's folder last, where whoever made them may have been stopped before: the log's
        opening trusts them, appends go on behind them, and segments are deleted for them."""
        try:
            if (not self.was_clean or key in self._half_opened) and self.disk.names(folder):
                self.disk.sync_dir(folder)
        except OSError as error:
            Faults(self, label).refuse_to_open(error, "opening the log")

    def _check_usable(self) -> None:
        if self.failed is not None:
            raise StorageFailed(**self.failed.facts)
        if self._closed:
            raise Closed(what=f"log directory {self.path}")

    def remove_log(self, topic_id: bytes, partition: int) -> None:
        """Close a log and delete all of it; nothing happens if there is none. It is gone for good once its folder is
        renamed; the files are unlinked by a thread of their own, for an unlink of 1 GiB takes 50 to 300 ms. A start
        removes what a stop leaves.
        """
        with self._lock:
            self._check_usable()
            self._forget_missing((topic_id, partition))
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
                Faults(self, folder.name).refuse_to_open(error, "deleting the log")
        self.unlink_soon(gone.name, partial(self._remove_deleted, gone))

    def _remove_deleted(self, gone: Path) -> bool:
        """Delete a folder that was renamed for it, unless `close` comes before its end. False: it is not to be called
        again."""
        try:
            if not self._remove_folder(gone):
                return False
        except FileNotFoundError:
            pass  # somebody else removes it too
        except OSError as error:
            Faults(self, gone.name).refuse_to_open(error, "deleting the log")
        log.info("log_deleted", folder=gone.stem)
        return False

    def unlink_soon(self, name: str, unlink: Callable[[], bool]) -> None:
        if self._threads:
            self._put_to_remove((name, unlink))
        else:
            while unlink():
                pass

    def _put_to_remove(self, asked: tuple[str, Callable[[], bool]]) -> None:
        """Queue a removal, once: one that is refused for days is asked for again by each retention."""
        if asked not in self._asked_to_remove:
            self._asked_to_remove.add(asked)
            self._to_remove.put(asked)

    def _unlink_loop(self) -> None:
        told = set()
        while (asked := self._to_remove.get()) is not None:
            if self._stopping or self.failed is not None:
                continue  # the next start removes it
            name, unlink = asked
            self._asked_to_remove.discard(asked)  # first: what is asked for from now on may come too late for this call
            try:
                if unlink():
                    self._put_to_remove(asked)
                told.discard(name)
            except Exception as error:
                if name not in told and self.failed is None:
                    told.add(name)
                    log.warning("not_unlinked", folder=name, reason=str(error))
                self._wait_stopping(_REMOVAL_RETRY_SECONDS)
                self._put_to_remove(asked)

    def _forget_missing(self, key: tuple[bytes, int]) -> None:
        self._missing.discard(key)
        self._untrusted.discard(key)

    def _remove_folder(self, folder: Path) -> bool:
        """Delete a folder; False if `close` came before its end."""
        names = self.disk.names(folder)
        if STAGING in names:
            if not self._remove_folder(folder / STAGING):
                return False
            names.remove(STAGING)
        for name in names:
            if self._stopping:
                return False
            self.disk.unlink(folder / name)
        self.disk.remove_dir(folder)
        return True

    def logs(self) -> list[Log]:
        """The open logs."""
        with self._lock:
            return list(self._logs.values())

    # --- failing -------------------------------------------------------------------------------------------------

    def fail(self, error: StorageFailed) -> None:
        """Take the directory out of service. Whoever waits for a flush is woken by a thread of its own: the caller
        may hold a log's lock."""
        with self._telling:
            if self.failed is not None:
                return
            self.failed = error
        log.error("log_directory_failed", directory=str(self.path), reason=error.facts.get("reason"))
        self._have_done(partial(self._tell_failure, error), "log-failed")

    def doubt(self, label: str, error: StorageFailed) -> None:
        """Have a thread of its own look for a partition's log, of which a file was not there: the caller may hold that
        log's lock. The directory fails with the error if the log is in its place."""
        with self._telling:
            if label in self._doubted or self.failed is not None:
                return
            self._doubted.add(label)
        self._have_done(partial(self._settle_doubt, label, error), "log-missing")

    def _have_done(self, call: Callable[[], object], name: str) -> None:
        """Have something done by a thread of its own: the caller may hold a log's locks. Where the machine has no
        thread left the one that tidies does it."""
        try:
            threading.Thread(target=call, name=name, daemon=True).start()
        except RuntimeError as error:
            log.warning("thread_not_started", name=name, reason=str(error))
            with self._timer:
                self._chores.append(call)
                self._timer.notify_all()

    def _settle_doubt(self, label: str, error: StorageFailed) -> None:
        try:
            if not self._check_removed(label):
                self._wait_stopping(_REMOVAL_SECONDS)
                if not self._check_removed(label):
                    self.fail(error)
        except KafkalogError:  # it cannot be looked for
            self.fail(error)
        finally:
            with self._telling:
                self._doubted.discard(label)

    def _check_removed(self, label: str) -> bool:
        """Look for the logs of a label; whether they, or with them the whole directory, were removed or closed. Removed
        ones are lost from now on."""
        with self._lock:
            if self._closed or not self._check_in_place():
                return True
            doubted = [(key, opened) for key, opened in self._logs.items() if opened.label == label]
        return all(self._lose_if_gone(key, opened) for key, opened in doubted)

    def _check_in_place(self) -> bool:
        """Look at the path; whether the directory that was opened stands there. If not, it is out of service from now
        on. Called with the lock held, or by a thread that `close` waits for."""
        lock = self.path / _LOCK
        try:
            if self.disk.stands_at(self._lock_fd, lock):
                return True
            reason = (
                f"{lock} is not the file any more that this broker has locked: the directory was removed, emptied or "
                "replaced while it was in use"
            )
        except OSError as error:
            if is_of_a_name(error) or passes(error):
                return True  # that says nothing of the directory
            reason = f"looking for {lock}: {error.strerror or error}"
        self.fail(StorageFailed(directory=str(self.path), reason=reason))
        return False

    def _lose_if_gone(self, key: tuple[bytes, int], opened: Log) -> bool:
        """Close an open log whose files somebody removed: it is lost from now on. False if it is open and they are
        there."""
        if not opened.is_gone():
            return False
        with self._lock:
            # Whoever deletes or replaces it has it out of _logs before he touches a file, and keeps the lock meanwhile.
            if self._closed or self._logs.get(key) is not opened:
                return True
            if not self._check_in_place():
                return True  # all of them are gone, and may be back
            del self._logs[key]
            self._missing.add(key)
            self._untrusted.add(key)
            opened.close(clean=False)
        self.on_lost(*key)
        return True

    @property
    def is_full(self) -> bool:
        """Whether the disk had no room for something in the last minute."""
        return self.clock.monotonic() - self._full_at < _FULL_LOGGED_EVERY_SECONDS

    def tell_full(self, error: DiskFull, label: str) -> None:
        """Log that there was no room for something of a partition, or nothing left to open its file with; each at most
        once a minute, however often it is tried."""
        now = self.clock.monotonic()
        event = "out_of_files" if isinstance(error, OutOfFiles) else "disk_full"
        with self._telling:
            if event == "disk_full":
                self._full_at = now
            if now - self._full_logged_at.get(event, float("-inf")) < _FULL_LOGGED_EVERY_SECONDS:
                return
            self._full_logged_at[event] = now
        log.warning(event, partition=label, directory=str(self.path), reason=str(error))

    def _tell_failure(self, error: StorageFailed) -> None:
        self.on_failed(error)
        for opened in self.logs():
            opened.on_flushed()

    # --- threads -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start flushing and tidying in the background; what was asked for before is done now."""
        assert not self._threads, "started already"
        self._threads = [
            *(threading.Thread(target=self._flush_loop, name=f"flusher-{i}", daemon=True) for i in range(_FLUSHERS)),
            threading.Thread(target=self._timer_loop, name="log-timer", daemon=True),
            threading.Thread(target=self._tidy_loop, name="log-tidy", daemon=True),
            threading.Thread(target=self._unlink_loop, name="log-unlink", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def flush_soon(self, log: Flushable) -> None:
        self._to_flush.put(log)

    def flush_within(self, log: Flushable, seconds: float) -> None:
        deadline = self.clock.monotonic() + seconds
        with self._timer:
            known = self._timed.get(log)
            if known is not None:
                if known.at <= deadline:
                    return
                known.log = None
            mine = self._timed[log] = _Deadline(deadline, next(self._ticket), log)
            heapq.heappush(self._deadlines, mine)
            if self._deadlines[0] is mine:
                self._timer.notify_all()

    def flush_not(self, log: Flushable) -> None:
        with self._timer:
            known = self._timed.pop(log, None)
            if known is not None:
                known.log = None

    def _flush_loop(self) -> None:
        while (asked := self._to_flush.get()) is not None:
            try:
                asked.flush()
            except (StorageFailed, Closed):
                pass  # the failure was told, and a closed log is flushed
            except DiskFull as full:
                self.tell_full(full, asked.label)
                self.flush_within(asked, _FULL_RETRY_SECONDS)
            except Exception:
                log.exception("flush_failed", partition=asked.label)

    def _timer_loop(self) -> None:
        with self._timer:
            while not self._stopping:
                try:
                    self._timer.wait(self._take_due())
                except Exception:  # every topic's flush.ms hangs on this thread
                    log.exception("flush_timer_failed", directory=str(self.path))
                    self._timer.wait(1.0)

    def _take_due(self) -> float | None:
        """Have the logs flushed whose time has come; the seconds until the next one's."""
        now = self.clock.monotonic()
        while self._deadlines and (self._deadlines[0].log is None or self._deadlines[0].at <= now):
            due = heapq.heappop(self._deadlines).log
            if due is not None:
                del self._timed[due]
                self._to_flush.put(due)
        return min(self._deadlines[0].at - now, _WAIT_SECONDS_MAX) if self._deadlines else None

    def _tidy_loop(self) -> None:
        seconds = min(self.check_interval_ms / 1000, _WAIT_SECONDS_MAX)
        while True:
            with self._timer:
                self._timer.wait_for(lambda: self._stopping or self._chores, seconds)
                if self._stopping:
                    return
                chore = self._chores.popleft() if self._chores else self.tidy
            try:
                chore()
            except Exception:
                log.exception("tidy_failed", directory=str(self.path))

    def _wait_stopping(self, seconds: float) -> bool:
        with self._timer:
            return self._timer.wait_for(lambda: self._stopping, min(seconds, _WAIT_SECONDS_MAX))

    def tidy(self) -> None:
        """One round over every log: whether it is still there, then rolls by age, retention, checkpoints and forgetting
        of producers."""
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
                opened.forget_silent_producers(self.steady_clock.now_us() - self.producer_expiration_ms * 1000)
                opened.checkpoint()
            except (StorageFailed, Closed):
                continue
            except DiskFull as error:
                self.tell_full(error, opened.label)
            except KafkalogError as error:
                log.warning("tidy_failed", partition=opened.label, reason=str(error))
            except Exception:
                log.exception("tidy_failed", partition=opened.label)

    def close(self, clean: bool = True) -> None:
        """Stop the threads, close every log, give the directory up.

        Args:
            clean: flush and save everything, so that the next start has nothing to recover.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            logs = list(self._logs.items())
        with self._timer:
            self._stopping = True
            self._timer.notify_all()
        for _ in range(_FLUSHERS if self._threads else 0):
            self._to_flush.put(None)
        self._to_remove.put(None)
        for thread in self._threads:
            thread.join()
        all_saved = clean or not logs  # without a log open it is as it was found
        for _, opened in logs:
            try:
                opened.close(clean)
            except KafkalogError as error:
                all_saved = False
                log.warning("log_not_saved", partition=opened.label, reason=str(error))
        try:
            # A log that nobody opened is as it was left: clean only if everything was.
            untouched = {*self.existing()} - {key for key, _ in logs}
            if all_saved and not self._missing and self.failed is None and (self.was_clean or not untouched):
                write_atomic(self.disk, self.path / _CLEAN, b"")
        except OSError as error:
            log.warning("clean_stop_not_marked", directory=str(self.path), reason=str(error))
        finally:
            with self._lock, contextlib.suppress(OSError):
                self.disk.close(self._lock_fd)
