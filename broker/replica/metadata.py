"""The cluster as ZooKeeper describes it: topics with the states of their partitions, and live brokers. `watcher.py`
reads changes into it; requests look at the views.

Views are replaced, never changed, and read without a lock. While ZooKeeper is unreachable the last ones stay.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping

from broker.config import TopicSettings
from kafkalog.clock import SYSTEM_CLOCK, Clock
from kafkalog.errors import UnknownTopic, UnknownTopicId
from kafkalog.events import get_logger
from kafkalog.versions import FIRST
from kafkalog.zk import registry
from kafkalog.zk.cluster import read_cluster
from kafkalog.zk.registry import BrokerRecord, TopicRecord
from kafkalog.zk.session import ZooKeeperSession

log = get_logger(__name__)


class Metadata:
    """Topics and brokers of the cluster.

    Attributes:
        session: the connection to ZooKeeper.
        changed: guards `dirty`, and all else that the watching thread waits for; notified after the views changed.
        dirty: paths of znodes that changed and are not read yet.
        format_level: the cluster's: nothing may be written in a format of a higher one (`kafkalog/versions.py`).
        is_current: everything was read since the last connection to ZooKeeper. Guarded by `changed`.
        behind_since: when the watching thread began to read and to act on what had changed, by the monotonic clock;
            None once it has done so. Guarded by `changed`.
        stopping: nothing will be read any more.
    """

    def __init__(
        self, session: ZooKeeperSession, clock: Clock = SYSTEM_CLOCK, behind_seconds: float = math.inf
    ) -> None:
        """
        Args:
            clock: of `behind_since`.
            behind_seconds: for how long the watching thread may read and act on what had changed before its views count
                as those of another time.
        """
        self.session = session
        self._clock = clock
        self._behind_seconds = behind_seconds
        self.changed = threading.Condition()
        self.dirty: set[str] = set()
        self.format_level = FIRST
        self.is_current = False
        self.behind_since: float | None = None
        self.stopping = False
        self._topics: Mapping[str, TopicRecord] = {}
        self._ids: Mapping[bytes, TopicRecord] = {}
        self._brokers: Mapping[int, BrokerRecord] = {}
        self._partition_counts: Mapping[str, tuple[bytes, int]] = {}

    # --- what requests ask -----------------------------------------------------------------------------------------

    def topic(self, name: str) -> TopicRecord:
        """Raises UnknownTopic."""
        found = self._topics.get(name)
        if found is None:
            raise UnknownTopic(topic=name)
        return found

    def topic_by_id(self, topic_id: bytes) -> TopicRecord:
        """Raises UnknownTopicId."""
        found = self._ids.get(topic_id)
        if found is None:
            raise UnknownTopicId(topic_id=topic_id.hex())
        return found

    @property
    def topics(self) -> Mapping[str, TopicRecord]:
        """Every topic, by name, in the order of names."""
        return self._topics

    @property
    def ids(self) -> Mapping[bytes, TopicRecord]:
        """Every topic, by id."""
        return self._ids

    @property
    def partition_counts(self) -> Mapping[str, tuple[bytes, int]]:
        """The id and the number of partitions of every topic, by name. It is the same object while these are the same,
        so a change of leaders is no news to those who compare it."""
        return self._partition_counts

    @property
    def brokers(self) -> Mapping[int, BrokerRecord]:
        """Every live broker, by id."""
        return self._brokers

    def leader_id(self, topic: TopicRecord, number: int) -> int:
        """The broker that leads a partition, live or not; -1 while its log was never opened, or nobody leads."""
        state = topic.states.get(number)
        return state.leader if state is not None else -1

    def is_certain(self) -> bool:
        """Whether the views, and the roles of partitions, are those of this moment, but for what ZooKeeper is just
        reporting. False while another broker may have been elected without this one's knowledge."""
        return self.is_current and not self.stopping and self.session.is_kept and self.is_followed

    @property
    def is_followed(self) -> bool:
        """Whether all that had changed a while ago was read and acted on. A disk that hangs keeps the watching thread
        from it, but not the session from being kept."""
        behind_since = self.behind_since
        return behind_since is None or behind_since > self._clock.monotonic() - self._behind_seconds

    def wait_until(self, reached: Callable[[], bool], seconds: float) -> bool:
        """Wait until `reached` is true, checked after each change; returns False if the time ran out or the broker
        stops before."""
        with self.changed:
            return self.changed.wait_for(lambda: reached() or self.stopping, seconds) and reached()

    # --- reading ---------------------------------------------------------------------------------------------------

    def path_changed(self, path: str) -> None:
        """Mark a znode to be read again; a watch."""
        with self.changed:
            self.dirty.add(path)
            self.changed.notify_all()

    def read_brokers(self) -> None:
        """Raises ZooKeeperUnreachable."""
        self._brokers = registry.live_brokers(self.session, self.path_changed)

    def read_cluster(self) -> None:
        """Raises ZooKeeperUnreachable, UnreadableZnode."""
        found = read_cluster(self.session, self.path_changed)
        if found is None or found.format_level <= self.format_level:  # removed or restored by hand: it is never lowered
            return
        self.format_level = found.format_level
        log.info("format_level_changed", level=found.format_level)

    def publish(self, topics: Mapping[str, TopicRecord]) -> None:
        """Replace the view of the topics."""
        self._topics = dict(sorted(topics.items()))
        self._ids = {record.topic_id: record for record in topics.values()}
        counts = {name: (record.topic_id, len(record.replicas)) for name, record in self._topics.items()}
        if counts != self._partition_counts:
            self._partition_counts = counts

    def stop(self) -> None:
        """End all waits."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()


def topic_settings(topic: TopicRecord) -> TopicSettings:
    """A topic's settings. Those of a newer version, which this one does not understand, have their defaults.

    With an unknown cleanup.policy nothing is deleted, because this version cannot know what the policy keeps.
    """
    values, refused = TopicSettings.understood(topic.config)
    return values.with_({"retention.ms": -1, "retention.bytes": -1}) if "cleanup.policy" in refused else values
