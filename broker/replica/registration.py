"""Registers this broker as live in ZooKeeper: at the start, again after every loss of the session, and never again
after its directory is out of service, or after another broker took its id."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from broker.config import BrokerSettings
from broker.replica.metadata import Metadata
from broker.replica.undone import Undone
from broker.storage.disk_errors import DirectoryHealth
from kafkalog.clock import Clock
from kafkalog.errors import InvalidSetting, ZooKeeperUnreachable
from kafkalog.events import get_logger
from kafkalog.zk import paths, registry
from kafkalog.zk.registry import BrokerRecord

log = get_logger(__name__)


class Registration:
    """Thread-safe, except for `renew`, which the watching thread calls.

    Args:
        record: the broker's entry in the registry.

    Attributes:
        taken: why this broker has given up its id: a live broker of another directory has it.
    """

    def __init__(
        self,
        record: BrokerRecord,
        metadata: Metadata,
        health: DirectoryHealth,
        settings: BrokerSettings,
        clock: Clock,
    ) -> None:
        self._record = record
        self._metadata = metadata
        self._session = metadata.session
        self._health = health
        self._settings = settings
        self._clock = clock
        self.taken: InvalidSetting | None = None
        # Guarded by metadata.changed.
        self._asked = False  # `register` was called: from then on the thread registers again after a lost session
        self._withdrawn = False
        self._is_due = False

    def check_id(self) -> None:
        """Check, before anything is opened or written, that this broker may register, as far as that can be known.

        Raises:
            InvalidSetting: a live broker of another directory, or of a copy of this one, has this id.
        """
        self._wait_for_id(lambda: registry.other_broker(self._session, self._record))

    def register(self) -> None:
        """Register this broker, now and after every loss of the session.

        Raises:
            InvalidSetting: a live broker of another directory, or of a copy of this one, has this id.
            StorageFailed: its own directory is out of service.
        """
        self._health.check()
        with self._metadata.changed:
            self._asked = True
        self._wait_for_id(lambda: registry.register_broker(self._session, self._record))
        if self._withdrawn:  # meanwhile, perhaps before the entry was written
            registry.withdraw_broker(self._session, self._record)
        self._health.check()
        self._metadata.wait_until(lambda: self._record.broker_id in self._metadata.brokers, 10.0)

    def raise_epoch(self) -> None:
        """End all registrations of this broker until now, and go on with the next one if it is registered.

        Raises:
            ZooKeeperUnreachable.
            InvalidSetting: a live broker of another directory has this id; its registration goes on.
        """
        other = registry.raise_broker_epoch(self._session, self._record)
        if other is not None:
            raise self._taken_by(other)

    def announce_stop(self) -> None:
        """Announce that this broker is about to stop: other in-sync replicas take over its partitions. Raises
        ZooKeeperUnreachable."""
        with self._metadata.changed:
            self._record = replace(self._record, stopping=True)
            is_registered = self._asked and not self._withdrawn
        if is_registered:
            registry.register_broker(self._session, self._record)

    def wait_without_leaderships(self, seconds: float) -> bool:
        """Wait until this broker leads no partition that another in-sync replica could lead. Returns False if the time
        ran out before."""
        return self._metadata.wait_until(lambda: not self.leads_for_others, seconds)

    @property
    def leads_for_others(self) -> bool:
        """Whether this broker leads a partition that another in-sync replica could lead."""
        if self.taken is not None:
            return False
        me = self._record.broker_id
        others = {broker.broker_id for broker in self._metadata.brokers.values() if not broker.stopping} - {me}
        return any(
            state.leader == me and not others.isdisjoint(state.isr)
            for topic in self._metadata.topics.values()
            for state in topic.states.values()
        )

    def _wait_for_id(self, holder: Callable[[], BrokerRecord | None]) -> None:
        """Wait until no other live broker has the id: a dead broker's entry ends with its session's timeout."""
        deadline = self._clock.monotonic() + self._settings.zookeeper_session_timeout_ms / 1000 + 2
        is_told = False
        while True:
            with self._session.patient():
                other = holder()
            if other is None:
                return
            if self._clock.monotonic() > deadline:
                raise self._taken_by(other)
            if not is_told:
                is_told = True
                log.info("earlier_registration_awaited", broker_id=other.broker_id, directory=other.directory)
            with self._metadata.changed:
                self._metadata.changed.wait(0.2)

    def withdraw(self) -> None:
        """Unregister this broker for good. The watching thread does it if ZooKeeper cannot be asked now; it may hang in
        the disk for which this is called."""
        with self._metadata.changed:
            self._withdrawn = self._is_due = True
            self._metadata.changed.notify_all()
        if self._asked:
            with suppress(ZooKeeperUnreachable):
                registry.withdraw_broker(self._session, self._record)

    @property
    def epoch(self) -> int:
        """The epoch of this broker's registration as it was last read; 0 while it is not registered."""
        found = self._metadata.brokers.get(self._record.broker_id)
        is_own = found is not None and self.taken is None and not registry.is_another(found, self._record)
        return found.epoch if found is not None and is_own else 0

    @property
    def is_due(self) -> bool:
        """Whether `renew` has something to do."""
        return self._is_due

    def session_lost(self) -> None:
        """Note that the session was replaced. Called under metadata.changed."""
        self._is_due = True

    def take_due(self) -> bool:
        """Return `is_due`, and reset it. Called under metadata.changed."""
        due, self._is_due = self._is_due, False
        return due

    def renew(self, undone: Undone) -> None:
        """Write or remove the record again. Raises as `check_held`."""
        if not self._asked:
            return
        other = None
        with undone.sparing_others(paths.broker(self._record.broker_id)):
            if self._withdrawn:
                registry.withdraw_broker(self._session, self._record)
                return
            other = registry.register_broker(self._session, self._record)
        self._give_up_for(other)

    def check_held(self) -> None:
        """Check that no other broker has this id. What was read before is then no other's business.

        Raises:
            InvalidSetting: a live broker of another directory has it; `taken` from now on.
        """
        self._give_up_for(registry.other_broker(self._session, self._record))

    def _give_up_for(self, other: BrokerRecord | None) -> None:
        if other is not None:
            self.taken = self._taken_by(other)
            raise self.taken

    def _taken_by(self, other: BrokerRecord) -> InvalidSetting:
        """The error for a broker whose id another live broker has."""
        reason = f"the broker at {other.host}:{other.grpc_port} has this id ({other.where})"
        if other.directory == self._record.directory:
            reason += ", and one of the two data directories is a copy of the other: start only one of the two brokers"
        else:
            reason += ": give this one another broker.id"
        return InvalidSetting(name="broker.id", value=self._record.broker_id, reason=reason)
