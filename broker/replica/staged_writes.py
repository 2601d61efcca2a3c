"""Staged writes of a partition: the parts of Spark's tasks are kept beside the log until their batch is decided, and
are appended to it then. `broker/staging/staging.py` has the files, `applier.py` appends; here are the checks and acks
of a leader, and who is woken. A follower has copies, and forgets as time passes.

Thread-safe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from broker.replica.ack import Ack
from broker.replica.applier import Applied, Applier
from broker.replica.role import Role
from broker.replica.waiters import Waiters
from broker.staging.copies import StagedCopy, StagedPiece
from broker.staging.format import PreparedSet
from broker.staging.part import Write
from broker.staging.staging import Staged, Staging
from broker.storage.log import Log
from broker.storage.segment import FileSlice
from kafkalog.errors import StagedPartLost
from kafkalog.format.batch import Batch


class AckOfReplicas(Protocol):
    """What the ack of a write waits for when the in-sync set must have it; None: for nothing."""

    def __call__(self, epoch: int, end_offset: int, staged_end: int) -> Ack | None: ...


class StagedWrites:
    """The staged writes of a partition.

    Args:
        waiters, replica_waiters: of the partition.
        ack_of_replicas: makes its acks.
    """

    def __init__(
        self,
        log: Log,
        staging: Staging,
        applier: Applier,
        role: Role,
        waiters: Waiters,
        replica_waiters: Waiters,
        ack_of_replicas: AckOfReplicas,
    ) -> None:
        self._log = log
        self._staging = staging
        self._applier = applier
        self._role = role
        self._waiters = waiters
        self._replica_waiters = replica_waiters
        self._ack_of_replicas = ack_of_replicas

    # --- for clients ---------------------------------------------------------------------------------------------

    def stage(self, uuid: bytes, batches: Sequence[Batch]) -> tuple[int, int, Ack | None]:
        """Keep checked batches of a part beside the log. Returns how many batches the part has, how many bytes, and
        what the ack waits for. See Staging.stage; raises NotLeader, NotEnoughReplicas too."""
        with self._as_leader(needs_replicas=True) as epoch:
            return *self._staging.stage(uuid, batches), self._ack(epoch)

    def prepare(self, prepared: PreparedSet) -> Ack | None:
        """Record parts as a set; it is durable after `keep_prepared`, and on the replicas when the ack is kept. See
        Applier.prepare."""
        with self._as_leader(needs_replicas=True) as epoch:
            self._applier.prepare(prepared)
            self._staging.request_sync()
            return self._ack(epoch)

    def keep_prepared(self, commit_uuid: bytes) -> None:
        """Make a recorded set durable, and check that it is as it was staged. Raises as Staging.check."""
        with self._role.hosted():
            self._staging.check(commit_uuid)  # while a thread of the directory does the requested sync
            self._staging.sync()

    def apply(self, transactional_id: str, producer_id: int, batch_id: int, commit_uuid: bytes) -> Applied:
        """Append the missing record batches of a decided batch; durable after `finish_apply`. See Applier.apply.

        The flush that shows the batch wakes waiting readers; they are also woken here, in case that flush is over.
        """
        with self._applying() as epoch:
            return self._applier.apply(transactional_id, producer_id, batch_id, commit_uuid, epoch)

    def try_apply(self, transactional_id: str, producer_id: int, batch_id: int, commit_uuid: bytes) -> Applied | None:
        """`apply`, or None while another apply or drop is under way."""
        with self._applying() as epoch:
            return self._applier.try_apply(transactional_id, producer_id, batch_id, commit_uuid, epoch)

    @contextmanager
    def _applying(self) -> Iterator[int]:
        """Yields the leader epoch."""
        try:
            with self._as_leader() as epoch:
                yield epoch
        finally:
            self._role.advance()
            self._waiters.wake()

    @contextmanager
    def _as_leader(self, needs_replicas: bool = False) -> Iterator[int]:
        """Yields the leader epoch. Followers copy what the `with` block stages or appends.

        Raises:
            NotLeader: this broker does not lead.
            NotEnoughReplicas: what is staged could not be acknowledged.
            OffsetNotAvailable: something is not staged here, but another replica may lead by now, and have it.
        """
        leadership = self._role.leadership
        if leadership is None:
            raise self._role.not_here()
        if needs_replicas:
            self._role.check_enough(leadership)
        with self._role.hosted():
            try:
                yield leadership.epoch
            except StagedPartLost:
                self._role.check_leads_surely()
                raise
            finally:
                self._replica_waiters.wake()

    @property
    def unsynced_bytes(self) -> int:
        """About how many bytes a prepare has to sync here."""
        return self._staging.unsynced_bytes

    def prepared_bytes(self, commit_uuid: bytes) -> int:
        """The size of a prepared set, 0 if there is none."""
        return self._staging.prepared_bytes(commit_uuid)

    @property
    def work(self) -> int:
        """Bytes that were checked and synced for prepares, or checked, appended and synced for applies, since the
        start. Callers that wait see progress by it. Repeated work does not count."""
        return self._applier.applied_bytes + self._staging.checked_bytes + self._staging.synced_bytes

    def finish_apply(self, applied: Applied) -> None:
        """Wait until an applied batch is durable here; readers see it from then on, once the in-sync set has it."""
        with self._role.hosted():
            self._applier.finish(applied)
        self._role.advance()

    def ack_of_apply(self, applied: Applied) -> Ack | None:
        """What the ack of an applied batch waits for besides `finish_apply`; None: for nothing."""
        return self._ack(applied.epoch, applied.sync_to)

    def _ack(self, epoch: int, end_offset: int = 0) -> Ack | None:
        """What the ack of all that is staged by now waits for; None: for nothing."""
        return self._ack_of_replicas(epoch, end_offset, self._staging.staged_end)

    def drop(self, commit_uuid: bytes, below_version: int, wait: bool = True) -> bool:
        """Forget a prepared set; see Applier.drop."""
        with self._as_leader():
            dropped = self._applier.drop(commit_uuid, below_version, wait)
        self._waiters.wake()
        return dropped

    def forget(self, transactional_id: str, batch_id: int, stays: bool) -> None:
        """Forget a transaction's staged data up to a batch that is done. `stays` as in `Applier.forget`."""
        with self._as_leader():
            self._applier.forget(transactional_id, batch_id, stays)

    def abort(self, uuids: Iterable[bytes]) -> None:
        """Forget parts that are not prepared."""
        with self._as_leader():
            self._staging.abort(uuids)

    def renew(self, write: Write) -> None:
        """Keep the parts of a write, because one of its tasks still runs."""
        with self._role.hosted():
            self._staging.renew(write)

    def expire(self, writes: Collection[Write], before: float) -> int:
        """Forget parts of some writes that are not prepared, and not renewed since a time; returns how many. A follower
        forgets what its leader has forgotten."""
        if not self._role.leads or not self._staging.may_expire(writes, before):
            return 0  # and the followers are not woken
        with self._as_leader():
            return self._staging.expire(writes, before)

    def forget_silent(self) -> None:
        """Forget the apply progress of transactions that ended long ago, whether it leads or follows."""
        if not self._log.knows_transactions:
            return
        if self._role.leads:
            with self._as_leader():
                self._applier.tend()
        else:
            with self._role.hosted():
                self._applier.forget_progress()

    @property
    def size_bytes(self) -> int:
        """Bytes of the files of staged data."""
        return self._staging.size_bytes

    def all(self) -> list[Staged]:
        """The staged parts and sets."""
        return self._staging.staged()

    # --- for followers -------------------------------------------------------------------------------------------

    def news(
        self, staged: Sequence[StagedCopy], max_bytes: int
    ) -> tuple[list[StagedCopy] | None, list[tuple[StagedPiece, FileSlice]]]:
        """The files of what is staged here, if a follower with these copies has to remove or cut some, else None; and
        the next pieces that it lacks, as they stand in the files."""
        with self._role.hosted():
            lacking = self._staging.lacking(staged, max_bytes)
            pieces = ((each, self._staging.slice(each)) for each in lacking.pieces)
            return lacking.files, [(each, found) for each, found in pieces if found is not None]

    def copies(self) -> list[StagedCopy]:
        """The files of what is staged here."""
        return self._staging.copies()
