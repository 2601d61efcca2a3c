"""The thread that follows ZooKeeper: reads changes into the metadata, has the host act on them, and keeps this broker
registered. It decides nothing about partitions.

If another live broker has this one's id, with another directory, this one was taken for dead and replaced. It closes
all partitions, and follows nothing any more: what the states say of the id is not about it.

Watches wake it. Logs are opened in turns of half a second, between which it reads other changes, so that thousands of
logs do not delay another topic. A failure with one topic affects that topic alone (`undone.py`).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from broker.replica.host import Host, PartitionKey
from broker.replica.metadata import Metadata
from broker.replica.registration import Registration
from broker.replica.undone import RETRY_SECONDS, Undone
from kafkalog.clock import Clock
from kafkalog.errors import PartitionLost, UnreadableZnode, ZooKeeperUnreachable
from kafkalog.events import get_logger
from kafkalog.zk import paths, registry
from kafkalog.zk.registry import TopicRecord

log = get_logger(__name__)

_EVERY_TOPIC = paths.TOPICS + "/"
_EVERYTHING = frozenset({paths.CLUSTER, paths.BROKER_IDS, paths.TOPICS, paths.DELETED_TOPICS, _EVERY_TOPIC})
"""What is to be read where no watch can be relied on; in `dirty` beside the paths that changed."""


class Watcher:
    """`start` before requests are served, `stop` after the last one.

    Attributes:
        on_taken: called once this broker has given up its id (`Registration.taken`).
    """

    def __init__(
        self, metadata: Metadata, host: Host, registration: Registration, undone: Undone, clock: Clock
    ) -> None:
        self._metadata = metadata
        self._changed = metadata.changed  # guards _removed
        self._session = metadata.session
        self._host = host
        self._registration = registration
        self._undone = undone
        self._clock = clock
        self._removed: set[PartitionKey] = set()  # closed by the directory, because their files were removed
        self._read_later: set[str] = set()  # paths of states that changed while their topics' logs were being opened
        self.on_taken: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._follow, name="zookeeper-watcher", daemon=True)

    def start(self) -> None:
        """Read everything once, open the logs, then follow changes. Raises ZooKeeperUnreachable, InvalidSetting."""
        self._session.on_state(self._state_changed)  # first: a reconnect during the sync loses the watches it has set
        self._sync(_EVERYTHING)
        while self._host.has_work:
            self._sync(())
        self._host.warn_of_strays()
        self._thread.start()

    def stop(self) -> None:
        """Stop following; hosted partitions stay. Safe to call twice."""
        self._metadata.stop()
        if self._thread.is_alive():
            self._thread.join()

    def log_removed(self, topic_id: bytes, number: int) -> None:
        """Note that the directory closed a log whose files were removed."""
        with self._changed:
            self._removed.add((topic_id, number))
            self._changed.notify_all()

    def _state_changed(self, connected: bool, session_is_new: bool) -> None:
        with self._changed:
            self._metadata.is_current = False
            if not connected:
                return
            if session_is_new:
                self._registration.session_lost()
            self._metadata.dirty |= _EVERYTHING
            self._changed.notify_all()

    def _follow(self) -> None:
        metadata, undone = self._metadata, self._undone
        while True:
            with self._changed:
                pause = undone.retry_at - self._clock.monotonic() if self._to_retry() else None
                self._changed.wait_for(
                    lambda: (
                        metadata.dirty
                        or self._removed
                        or self._registration.is_due
                        or self._host.has_work
                        or metadata.stopping
                    ),
                    pause,
                )
                if metadata.stopping:
                    return
                if metadata.behind_since is None:
                    metadata.behind_since = self._clock.monotonic()
                dirty, metadata.dirty = metadata.dirty, set()
                removed, self._removed = self._removed, set()
                if self._clock.monotonic() >= undone.retry_at:
                    dirty |= self._to_retry()
                    undone.retry_later()  # in any case, so that no retry follows at once
                reregister = self._registration.take_due()
            try:
                self._host.take_out(removed)
                if reregister or paths.broker(self._host.broker_id) in undone.reasons:
                    self._registration.renew(undone)
                self._sync(dirty)
            except Exception as error:
                if error is self._registration.taken:
                    self._give_up()
                    return
                # Retried: a broker that stops following would serve old views for ever.
                if isinstance(error, ZooKeeperUnreachable):
                    log.warning("zookeeper_not_followed", reason=str(error))
                else:
                    log.exception("zookeeper_not_followed")
                with self._changed:
                    metadata.dirty |= dirty
                    self._removed |= removed
                    if reregister:
                        self._registration.session_lost()
                    self._changed.wait_for(lambda: metadata.stopping, RETRY_SECONDS)

    def _give_up(self) -> None:
        self._host.close()
        self._metadata.stop()
        self.on_taken()

    def _to_retry(self) -> set[str]:
        """Paths of failures that are worth a retry: not of logs that are lost, nor of a directory that is out of
        service."""
        again = {path for path in self._undone.reasons if not self._host.is_behind(_topic_of(path))}
        if self._host.failed is None:
            for (topic_id, _), error in self._host.unserved().items():
                topic = self._metadata.ids.get(topic_id)
                if topic is None or self._host.is_behind(topic.name):  # it is being tried
                    continue
                if not isinstance(error, PartitionLost):
                    again.add(paths.topic(topic.name))
        return again

    def _sync(self, dirty: Collection[str]) -> None:
        """Read what changed, and let the host act on it for one turn."""
        if paths.CLUSTER in dirty:
            with self._undone.sparing_others(paths.CLUSTER):
                self._metadata.read_cluster()
        if any(path.startswith(paths.BROKER_IDS) for path in dirty):
            self._metadata.read_brokers()
        self._read_topics(dirty)
        self._registration.check_held()  # after the states: a broker registers before it gets a role
        self._host.close_deleted()
        self._host.open_for_a_turn()
        self._host.settle_loss()
        self._host.remove_deleted(registry.deleted_topics(self._session, self._metadata.path_changed))
        with self._changed:
            ready = {path for path in self._read_later if not self._host.is_behind(_topic_of(path))}
            self._metadata.dirty |= ready
            self._read_later -= self._metadata.dirty
            if _EVERY_TOPIC in dirty:
                self._metadata.is_current = self._session.connected and _EVERY_TOPIC not in self._metadata.dirty
            self._metadata.behind_since = None
            self._changed.notify_all()

    def _read_topics(self, dirty: Collection[str]) -> None:
        """Read the topics and the states that changed, and publish them. If only states of a topic changed, nothing
        else of it is read: a broker that fails changes a state in each of many partitions."""
        watch = self._metadata.path_changed
        of_topics = {path for path in dirty if path.startswith(_EVERY_TOPIC) and path != _EVERY_TOPIC}
        # Each state that is written here while a topic's logs are opened comes back as a change, with which the host
        # would begin with the topic anew in every turn.
        own = {
            path for path in of_topics if path != paths.topic(name := _topic_of(path)) and self._host.is_opening(name)
        }
        topics = dict(self._metadata.topics)
        states = {path for path in of_topics - own if paths.partition_of_state(path) is not None}
        changed = {_topic_of(path) for path in of_topics - own - states}
        if paths.TOPICS in dirty:
            names = set(registry.topic_names(self._session, watch))
            changed |= names | set(topics) if _EVERY_TOPIC in dirty else names ^ set(topics)
        found, gone = [], []
        for name in sorted(changed):
            with self._undone.sparing_others(paths.topic(name), is_last=False):
                record = registry.read_topic(self._session, name, watch)
                if record is None or record.deleted:
                    topics.pop(name, None)
                    gone.append(name)
                    self._undone.reasons.pop(paths.topic(name), None)
                else:
                    topics[name] = record
                    found.append(name)
        found += self._read_states([path for path in states if _topic_of(path) not in changed], topics)
        self._read_later |= own
        self._host.look_at(found, gone)  # before `publish`: a topic's creator waits until it is not behind
        self._metadata.publish(topics)

    def _read_states(self, wanted: Iterable[str], topics: dict[str, TopicRecord]) -> list[str]:
        """Read states, and put them into the topics that have them. Returns the names of topics that changed by it."""
        numbers: dict[str, dict[str, int]] = defaultdict(dict)  # by topic and path
        for path in sorted(wanted):
            name, topic_id, number = paths.partition_of_state(path) or ("", b"", 0)
            topic = topics.get(name)
            if topic is not None and topic.topic_id == topic_id and number < len(topic.replicas):
                numbers[name][path] = number
        every = [path for of_topic in numbers.values() for path in of_topic]
        read = registry.read_states(self._session, every, self._metadata.path_changed)
        changed = []
        for name, of_topic in numbers.items():
            with self._undone.sparing_others(paths.topic(name), is_last=False):
                states = dict(topics[name].states)
                for path, number in of_topic.items():
                    state = read[path]
                    if isinstance(state, UnreadableZnode):
                        raise state
                    if state is None:
                        states.pop(number, None)
                    else:
                        states[number] = state
                if states != topics[name].states:  # else this broker wrote them
                    topics[name] = replace(topics[name], states=states)
                    changed.append(name)
        return changed


def _topic_of(path: str) -> str:
    """The topic whose znode, or a znode below it, is at a path; '' if there is none."""
    return path[len(_EVERY_TOPIC) :].partition("/")[0] if path.startswith(_EVERY_TOPIC) else ""
