"""A broker's data directory: its owner, the logs in it, and the thread that tidies them.

    lock         held while a broker has the directory; the holder's process id is in it
    meta         cluster id, broker id and the directory's own id (a sealed document, see checkpoint.py)
    clean        there only while no broker has it open and the last one closed every log properly
    <topic id as 32 hex digits>-<partition>/            one log: segments, indexes, producers, checkpoint
    <topic id>-<partition>.new/                         being made, in the place of one that was lost
    <topic id>-<partition>.deleted/                     on its way out
    <topic id>-<partition>.set-aside-<n>/               left where a new one was made; nothing here looks at it again

The directory's id is made at its first claim and never changes. The states of partitions in ZooKeeper name it, so that
a log that is missing here is known to be missing, and is not taken for one that was never there.

A failed read, write or fdatasync takes the whole directory out of service (`failed`): the page cache may differ from
the disk, so nothing is read or written until the broker is restarted. The removal or replacement of the directory does
the same. If somebody removes or moves the files of a log, only that log is lost (`on_lost`): each round of tidying
checks for this, and a missing file causes a check at once. A step that lacks space, a descriptor or memory fails alone
and may be retried. So does an error of a single name, when logs are opened or made, and when logs and segments are
deleted.
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
from broker.storage.checkpoint import TEMPORARY, read_whole, seal, unseal, write_atomic
from broker.storage.disk import Disk, is_of_a_name, passes, storage_error
from broker.storage.disk_errors import DirectoryHealth, DiskErrors
from broker.storage.flusher import WAIT_SECONDS_MAX, Flusher
from broker.storage.loader import make_empty_log
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

_LOCK = "lock"
_META = "meta"
_CLEAN = "clean"
_FOLDER = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]*)")
_DELETED = ".deleted"
_NEW = ".new"
_SET_ASIDE = ".set-aside-"
_META_FACTS = {"cluster_id": str, "broker_id": int, "directory_id": str}
_REMOVAL_SECONDS = 1.0
"""How long the removal of a folder is given to get to its last file, before a missing one is the disk's fault."""


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
        disk, clock: the machine's, or a test's.
        producer_batches_remembered, producer_state_max: see `Services`.
        producer_expiration_ms: silent producers are forgotten after that long.
        check_interval_ms: how often retention, rolls by age and checkpoints are checked.

    Attributes:
        was_clean: the last broker closed it properly, or there was none.
        cluster_id, broker_id: its owner; None until the first `claim`.
        directory_id: its id in ZooKeeper, 32 hex digits; None until the first `claim`.
        lock_id: identifies the locked file on this machine since its boot. A broker that has the lock knows that no
            other process with the same lock_id is alive.
        on_failed: called once with the error that took it out of service.
        on_lost: called with topic id and partition of a log that was closed because its files were removed; from any
            thread, with no lock held.
        services: shared by its logs, and by the other data in a partition's folder.

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
        producer_batches_remembered: int = BrokerSettings.producer_batches_remembered.default,
        producer_state_max: int = BrokerSettings.producer_state_max.default,
        producer_expiration_ms: int = BrokerSettings.producer_id_expiration_ms.default,
        check_interval_ms: int = BrokerSettings.log_retention_check_interval_ms.default,
    ) -> None:
        self.path = Path(path).absolute()
        health = DirectoryHealth(self.path, clock)
        health.on_failed = lambda error: self._have_done(partial(self._report_failure, error), "log-failed")
        health.on_doubt = self._doubt
        self.services = Services(
            path=self.path,
            disk=disk or Disk(),
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
        self.directory_id: str | None = None
        self._lock = threading.Lock()  # guards the sets below, _logs, _closed, _unsynced; before any log's locks
        self._logs: dict[tuple[bytes, int], Log] = {}
        self._missing: set[tuple[bytes, int]] = set()  # what `note_if_missing` found, and _untrusted
        self._untrusted: set[tuple[bytes, int]] = set()  # gone while open, or replaced and not trusted yet
        self._closed = False
        self._half_opened: set[tuple[bytes, int]] = set()  # opening failed, perhaps after names in the folder changed
        self._unsynced = False  # a folder was made, and its name may not be durable
        self._tidier: threading.Thread | None = None
        self._changed = threading.Condition()  # guards all below; after any log's locks
        self._doubted: set[str] = set()  # labels of logs that are being looked for
        self._stopping = False
        self._chores: deque[Callable[[], object]] = deque()  # calls for which no thread could be started
        try:
            self._open()
        except OSError as error:
            raise storage_error(self.path, error, "opening it") from error

    def _open(self) -> None:
        try:
            self.disk.make_dirs(self.path)
        except OSError as error:
            if is_of_a_name(error):  # a file has its name or a parent's; not a failure of the disk
                reason = f"it is not a directory and cannot be created: {error.strerror}"
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
                self.disk.sync_dir(self.path)  # a killed process may not have synced the names that it made
            for name in names:
                if name in (_META + TEMPORARY, _CLEAN + TEMPORARY):
                    self.disk.unlink(self.path / name)
                elif is_log_folder(name.removesuffix(_NEW)) and name.endswith(_NEW):
                    self._remove_folder(self.path / name)
                elif is_log_folder(name.removesuffix(_DELETED)) and name.endswith(_DELETED):
                    self._unlinker.later(name, partial(self._remove_deleted, self.path / name))
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
        """Set the directory's owner; the first call writes it to `meta`, and gives the directory its id.

        Raises:
            ClusterMismatch: it belongs to another cluster or broker.
            StorageFailed: it has logs, but its `meta` is missing.
        """
        ours = f"broker {broker_id} of cluster {cluster_id}"
        if self.cluster_id is not None:
            if (self.cluster_id, self.broker_id) != (cluster_id, broker_id):
                theirs = f"broker {self.broker_id} of cluster {self.cluster_id}"
                raise ClusterMismatch(directory=str(self.path), expected=theirs, actual=ours)
            return
        if self.existing():  # impossible after a crash: meta is written before the first log is made
            reason = f"it holds logs, but {self.path / _META}, which names their broker, is missing: put it back"
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
        """Whether a log is here: a folder with a segment, which every log has from its first opening on."""
        try:
            names = self.disk.names(self.path / folder_name(topic_id, partition))
        except FileNotFoundError:
            return False
        except OSError as error:
            DiskErrors(self._health, folder_name(topic_id, partition)).refuse_to_open(error, "looking for the log")
        return any(name.endswith(LOG_SUFFIX) for name in names)

    def note_if_missing(self, topic_id: bytes, partition: int) -> bool:
        """Check for a log that should be here. Returns whether it is missing, was missing while it was open, or is an
        empty replacement before `trust_log`. The directory is then not marked clean at the end, unless the log is
        replaced or deleted, because the state of a log that is put back is unknown."""
        with self._lock:
            if (topic_id, partition) not in self._untrusted and self.has_log(topic_id, partition):
                return False
            self._missing.add((topic_id, partition))
            return True

    def replace_log(self, topic_id: bytes, partition: int, label: str, start_offset: int) -> None:
        """Replace a lost log by an empty one, atomically. It counts as lost until `trust_log`, so that this call can be
        repeated.

        An existing folder of that name is kept under another name.

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
            if opened is not None:  # another broker has replaced it while this one had it open
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
                DiskErrors(self._health, folder.name).refuse_to_open(error, "making the log anew")

    def trust_log(self, topic_id: bytes, partition: int) -> None:
        """Accept the log that `replace_log` made as the partition's."""
        with self._lock:
            self._forget_missing((topic_id, partition))

    def open_log(self, topic_id: bytes, partition: int, label: str, settings: TopicSettings, leader_epoch: int) -> Log:
        """The log of a partition, created if there is none; an open log is returned again.

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
            DiskErrors(self._health, "logs").refuse_to_open(error, "making folders")

    def _sync_names(self, key: tuple[bytes, int], folder: Path, label: str) -> None:
        """Make the names in a log's folder durable, if the process that made them may have been stopped before: opening
        trusts these names, appends follow them, and segments are deleted because of them."""
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
        """Close a log and delete all of it; nothing happens if there is none. It is deleted when its folder is renamed.
        A thread of its own unlinks the files, because an unlink of 1 GiB takes 50 to 300 ms. A start removes what a
        stop leaves.
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
                DiskErrors(self._health, folder.name).refuse_to_open(error, "deleting the log")
        self._unlinker.soon(gone.name, partial(self._remove_deleted, gone))

    def _remove_deleted(self, gone: Path) -> bool:
        """Delete a folder that was renamed for deletion, unless `close` comes before the end. Returns False if it need
        not be called again."""
        try:
            if not self._remove_folder(gone):
                return False
        except FileNotFoundError:
            pass  # another process removes it too
        except OSError as error:
            DiskErrors(self._health, gone.name).refuse_to_open(error, "deleting the log")
        log.info("log_deleted", folder=gone.stem)
        return False

    def _forget_missing(self, key: tuple[bytes, int]) -> None:
        self._missing.discard(key)
        self._untrusted.discard(key)

    def _remove_folder(self, folder: Path) -> bool:
        """Delete a folder; False if `close` came before its end."""
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

    # --- failing -------------------------------------------------------------------------------------------------

    @property
    def failed(self) -> StorageFailed | None:
        """Why it is out of service; None while it serves."""
        return self._health.failed

    @property
    def is_full(self) -> bool:
        """Whether the disk had no room for something in the last minute."""
        return self._health.is_full

    def _doubt(self, label: str, error: StorageFailed) -> None:
        """Check, in a thread of its own, for a partition's log of which a file was missing. If the log is in its place,
        the directory fails with the error."""
        with self._changed:
            if label in self._doubted or self.failed is not None:
                return
            self._doubted.add(label)
        self._have_done(partial(self._settle_doubt, label, error), "log-missing")

    def _have_done(self, call: Callable[[], object], name: str) -> None:
        """Call something in a thread of its own, because the caller may hold a log's locks. If the machine has no
        thread left, the tidying thread does it."""
        try:
            threading.Thread(target=call, name=name, daemon=True).start()
        except RuntimeError as error:
            log.warning("thread_not_started", name=name, reason=str(error))
            with self._changed:
                self._chores.append(call)
                self._changed.notify_all()

    def _settle_doubt(self, label: str, error: StorageFailed) -> None:
        try:
            if not self._check_removed(label):
                self._wait_stopping(_REMOVAL_SECONDS)
                if not self._check_removed(label):
                    self._health.fail(error)
        except KafkalogError:  # the check failed
            self._health.fail(error)
        finally:
            with self._changed:
                self._doubted.discard(label)

    def _check_removed(self, label: str) -> bool:
        """Check for the logs of a label; returns whether they, or the whole directory, were removed or closed. Removed
        logs are lost from now on."""
        with self._lock:
            if self._closed or not self._check_in_place():
                return True
            doubted = [(key, opened) for key, opened in self._logs.items() if opened.label == label]
        return all(self._lose_if_gone(key, opened) for key, opened in doubted)

    def _check_in_place(self) -> bool:
        """Check that the opened directory is still at its path. If not, it is out of service from now on. Called with
        the lock held, or by a thread that `close` waits for."""
        lock = self.path / _LOCK
        try:
            if self.disk.stands_at(self._lock_fd, lock):
                return True
            reason = (
                f"{lock} is no longer the file that this broker has locked: the directory was removed, emptied or "
                "replaced while it was in use"
            )
        except OSError as error:
            if is_of_a_name(error) or passes(error):
                return True  # says nothing about the directory
            reason = f"looking for {lock}: {error.strerror or error}"
        self._health.fail(StorageFailed(directory=str(self.path), reason=reason))
        return False

    def _lose_if_gone(self, key: tuple[bytes, int], opened: Log) -> bool:
        """Close an open log whose files were removed: it is lost from now on. Returns False if it is open and they are
        there."""
        if not opened.is_gone():
            return False
        with self._lock:
            # A deletion or replacement removes it from _logs before it touches a file, and holds the lock meanwhile.
            if self._closed or self._logs.get(key) is not opened:
                return True
            if not self._check_in_place():
                return True  # all logs are gone, and may come back
            del self._logs[key]
            self._missing.add(key)
            self._untrusted.add(key)
            opened.close(clean=False)
        self.on_lost(*key)
        return True

    def _report_failure(self, error: StorageFailed) -> None:
        """Report the failure, and wake the waits for flushes."""
        self.on_failed(error)
        for opened in self.logs():
            opened.on_flushed()

    # --- threads -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start flushing and tidying in the background; what was asked for before is done now."""
        assert self._tidier is None, "started already"
        self.services.flusher.start()
        self._unlinker.start()
        self._tidier = threading.Thread(target=self._tidy_loop, name="log-tidy", daemon=True)
        self._tidier.start()

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

    def _wait_stopping(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, seconds)

    def tidy(self) -> None:
        """One round over every log: check that it is still there, then rolls by age, retention, checkpoints, and
        forgetting of producers."""
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
            except (StorageFailed, Closed):
                continue
            except DiskFull as error:
                self._health.log_full(error, opened.label)
            except KafkalogError as error:
                log.warning("tidy_failed", partition=opened.label, reason=str(error))
            except Exception:
                log.exception("tidy_failed", partition=opened.label)

    def close(self, clean: bool = True) -> None:
        """Stop the threads, close every log, release the directory.

        Args:
            clean: flush and save everything, so that the next start has nothing to recover.
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
        if self._tidier is not None:
            self._tidier.join()
        all_saved = clean or not logs  # without an open log it is as it was found
        for _, opened in logs:
            try:
                opened.close(clean)
            except KafkalogError as error:
                all_saved = False
                log.warning("log_not_saved", partition=opened.label, reason=str(error))
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
