"""Publishing a stream's position under its group while it runs. Knows offsets and a group's members; no Spark.

The position is Spark's: the start that Spark passes to `latestOffset`, and the end that it passes to `commit`, because
everything before them is processed. A thread writes it, through a broker, to ZooKeeper, and renews the stream's place
among the group's live members. Of several members only the first publishes; the others log a warning and take over when
it has ended. Nothing here fails a query, or slows it before the source's end: a failure is logged once until it passes,
and the next renewal tries again. But a stream that meets subscribed consumers in its group, and sees that they live,
publishes nothing any more: they may be away for a moment later, and would go on at its position instead of theirs.
Consumers that were killed stay members for their session.timeout.ms; they live if one renews its lease, or another one
comes.

Spark ends the process of a source without notice. A member that is not renewed expires after 10 s. A successor on the
same machine does not wait for that, because it sees that the process has ended.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kafkalog.errors import GroupKindDiffers, MemberFenced, UnknownMember
from kafkalog.events import get_logger
from pyspark_kafkalog import processes
from pyspark_kafkalog.offsets import PartitionOffsets

if TYPE_CHECKING:
    from kafkalog.client.cluster import Cluster
    from kafkalog.client.groups import GroupMember

log = get_logger(__name__)

RENEW_S = 3.0
"""How often a place among the live members is renewed."""
_LEASE_S = 10.0  # set by the brokers
_PUBLISH_EVERY_S = 0.2
"""How often a position is published at most, and the pause before a publication that failed is tried again."""
_FINISH_S = 5.0
_END_S = 1.0
_LAST_ATTEMPTS = 5
_RENEWED_S = 1.0
"""A lease that ends later by more than that was renewed."""


class Progress:
    """One stream's progress. Its methods return at once, but for `finish`, `finish_again` and `stop`; the thread starts
    with the first position, or with `begin`.

    Args:
        cluster: the group's.
        subscription: describes what the stream reads, for `kafkalog groups describe`.
    """

    def __init__(self, cluster: Cluster, group: str, subscription: str) -> None:
        self._cluster = cluster
        self._group = group
        self._subscription = subscription
        self._process = os.getpid()
        host = socket.gethostname()
        readable = re.sub(r"[^a-zA-Z0-9._-]", "_", host)[:200]
        self._name = f"{readable}-{self._process}-{uuid.uuid4().hex[:8]}"
        self._host = host
        self._changed = threading.Condition()  # guards the next eight; held for no I/O
        self._position: PartitionOffsets = {}
        self._topic_ids: dict[str, bytes] = {}
        self._asked = self._answered = 0
        self._is_published = True
        self._ending = False
        self._thread: threading.Thread | None = None
        self._tried_s = 0.0  # when `finish` or `finish_again` ended
        self._written: PartitionOffsets = {}  # the thread's own, as are the next eight
        self._epoch: int | None = None  # of the membership; None: it has to register
        self._renewed_s = 0.0
        self._order = 0
        self._is_first: bool | None = None
        self._failing = False
        self._is_loss_told = False
        self._leases_end_s: dict[str, float] = {}  # of the consumers, by name, as they were when they were met first
        self._has_given_up = False
        self._before_publishing: list[Callable[[], None]] = []  # `after` adds, the thread takes out

    def after(self, task: Callable[[], None]) -> None:
        """Make the thread call a task before it publishes anything (more), repeatedly until it succeeds."""
        self._before_publishing.append(task)

    def at(self, position: PartitionOffsets, topic_ids: Mapping[str, bytes] | None = None) -> None:
        """Note that the stream has processed everything before the position.

        Args:
            topic_ids: of the position's topics, if known; None: those of the last call.
        """
        if os.getpid() != self._process:  # a forked child's copy, which has no thread
            return
        with self._changed:
            if topic_ids is not None:
                self._topic_ids = dict(topic_ids)
            if position != self._position or self._thread is None:
                self._position = dict(position)
                self._asked += 1
            self._start()
            self._changed.notify_all()

    def begin(self) -> None:
        """Make the stream a member of the group if it has never been one: it reads, but its position is not known."""
        if not self._asked:
            self.at({})

    def done(self, end: PartitionOffsets) -> None:
        """Note that the stream has processed a batch that ended there. Partitions with a higher position keep it."""
        with self._changed:
            known = self._position
            self.at(known | {partition: max(offset, known.get(partition, 0)) for partition, offset in end.items()})

    def finish(self, timeout: float = _FINISH_S) -> bool:
        """Write the last position and leave the group; returns when that is done, or the time is over. False if the
        position was not written."""
        with self._changed:
            self.end()
            is_over = self._changed.wait_for(lambda: self._thread is None, timeout)
            self._tried_s = time.monotonic()
            if not is_over:
                log.warning("group_progress_late", group=self._group, waited_s=timeout)
            return is_over and self._is_published

    def finish_again(self) -> bool:
        """After a `finish` that failed: try again; whether the position is written by now. Other sources of the query
        go on meanwhile, so this waits for a tenth of the time since the last try, or for a moment."""
        with self._changed:
            patience = max(_PUBLISH_EVERY_S, min(_FINISH_S, (time.monotonic() - self._tried_s) / 10))
            if self._thread is None and not self._is_published:
                self._start()
                self.end()
            self._changed.wait_for(lambda: self._thread is None, patience)
            self._tried_s = time.monotonic()
            return self._thread is None and self._is_published

    def end(self) -> None:
        """Write the position, leave the group and stop, soon."""
        with self._changed:
            self._ending = self._thread is not None
            self._changed.notify_all()

    def stop(self) -> None:
        """The same, with a moment's time to do it."""
        self.finish(_END_S)

    # --- the thread

    def _start(self) -> None:
        """Lock held."""
        if self._thread is None:
            self._ending = False
            self._thread = threading.Thread(target=self._run, name="kafkalog-progress", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads
                self._thread, self._is_published = None, False
                self._failed(error)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked != self._answered or self._ending, RENEW_S)
                asked, position, ending = self._asked, self._position, self._ending
                topic_ids = self._topic_ids
            if ending:  # write all: a forced reset meanwhile may have moved partitions that did not go on
                self._written = {}
            published = self._publish(position, topic_ids)
            if ending:
                for _ in range(_LAST_ATTEMPTS):
                    if published:
                        break
                    # The source has ended, so no event wakes this thread. The cause (a broker does not know a topic
                    # yet, or restarts) ends inside brokers, which do not notify clients. So it retries a few times.
                    time.sleep(_PUBLISH_EVERY_S)
                    published = self._publish(position, topic_ids)
                if not published and not self._is_loss_told:
                    self._is_loss_told = True
                    log.warning(
                        "group_last_position_not_published",
                        group=self._group,
                        effect="consumers that go on with the group read the query's last records again; run it once "
                        "more when the group has no live member",
                    )
                self._leave()
            with self._changed:
                self._answered, self._is_published = asked, published
                if ending:
                    self._thread = None
                    self._changed.notify_all()
                    return
                # Of a fast stream not every position is written.
                self._changed.wait_for(lambda: self._ending, _PUBLISH_EVERY_S)

    def _publish(self, position: PartitionOffsets, topic_ids: Mapping[str, bytes]) -> bool:
        """Renew the membership, and write the position if the group's is ours to write. False if that failed."""
        if self._has_given_up:
            return True
        if time.monotonic() > self._renewed_s + _LEASE_S:  # another member may have come and gone meanwhile
            self._written = {}
        try:
            from kafkalog.client.groups import GroupMember, leave_group

            while self._before_publishing:
                self._before_publishing[0]()
                del self._before_publishing[0]
            me = GroupMember(self._name, self._subscription, self._host, processes.own_name())
            self._order += 1
            first = self._keep(me, position, topic_ids)
            if first.name != me.name and processes.has_ended(first.process):
                leave_group(self._cluster, self._group, first.name)
                first = self._keep(me, position, topic_ids)
        except GroupKindDiffers as error:
            self._met_consumers(error)
            return False
        except Exception as error:
            self._failed(error)
            return False
        self._failing, self._leases_end_s = False, {}
        self._renewed_s = time.monotonic()
        self._is_first, was_first = first.name == me.name, self._is_first
        if self._is_first:
            self._written = position
            if was_first is False:
                log.info("group_taken_over", group=self._group)
        else:
            self._written = {}
            if was_first is not False:
                self._warn_of(first)
        return True

    def _keep(self, me: GroupMember, position: PartitionOffsets, topic_ids: Mapping[str, bytes]) -> GroupMember:
        """Renew the membership, or register if it is over, and write what is new if this is the first member. Returns
        the group's first member."""
        from kafkalog.client.groups import keep_member

        while True:
            news = {p: offset for p, offset in position.items() if self._written.get(p) != offset}
            try:
                kept = keep_member(self._cluster, self._group, me, news, topic_ids, self._order, self._epoch)
            except (UnknownMember, MemberFenced):
                if self._epoch is None:  # it lapsed between two requests of one call
                    raise
                self._written, self._epoch = {}, None
            else:
                self._epoch = kept.epoch
                return kept.first

    def _leave(self) -> None:
        from kafkalog.client.groups import leave_group

        try:
            leave_group(self._cluster, self._group, self._name)
        except Exception as error:
            self._failed(error)
        self._written, self._epoch = {}, None

    def _warn_of(self, first: GroupMember) -> None:
        log.warning(
            "group_has_another_live_query",
            group=self._group,
            first=first.name,
            reads=first.subscription,
            effect="the position of this query, or of this source of the query, is not published; give each source a "
            "group of its own with kafkalog.group.id",
        )

    def _met_consumers(self, error: GroupKindDiffers) -> None:
        self._failed(error)
        if self._sees_live_consumers():
            self._has_given_up = True
            log.warning(
                "group_is_read_by_consumers",
                group=self._group,
                effect="this query's progress is not published until it is started again; give it a group of its own "
                "with kafkalog.group.id",
            )

    def _sees_live_consumers(self) -> bool:
        """Whether a consumer has renewed its lease, or come, since the first call. False if that cannot be seen now."""
        from kafkalog.client.groups import describe_group

        asked_s = time.monotonic()
        try:
            found = describe_group(self._cluster, self._group, patient=False)
        except Exception as error:
            self._failed(error)
            return False
        left_s = {each.name: each.left_ms / 1000 for each in found.members if found.kind == "consumer"}
        first_s = self._leases_end_s
        if not first_s:
            answered_s = time.monotonic()
            self._leases_end_s = {name: answered_s + left for name, left in left_s.items()}
            return False
        return any(
            name not in first_s or (left and asked_s + left > first_s[name] + _RENEWED_S)
            for name, left in left_s.items()
        )

    def _failed(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            log.warning("group_progress_not_published", group=self._group, reason=str(error))
