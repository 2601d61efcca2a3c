"""A stream's position and what a stream remembers from its start in this process on: where it starts, how far each
micro-batch goes, what its tasks read.

A stream's position is in Spark's checkpoint, as JSON. The reader's own state between micro-batches (its start, the
ids of its topics, the target of AvailableNow) is lost at a restart and must not be needed then. Spark calls
`initialOffset` twice on a first start, so it is remembered: a `latest` that moved in between would lose what lies
there. For the same reason the first `latestOffset` of a stream that starts at latest returns the start unchanged (with
Trigger.Once: of the partitions whose start moves): an empty first batch writes the position down before anything is
read. A start at what a group has committed, which others may move, is held the same way.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from kafkalog.errors import BrokerUnreachable, CheckpointOfOthers, DataLost, KafkalogError, UnknownTopic
from kafkalog.events import get_logger
from kafkalog.records import TopicPartition
from pyspark_kafkalog.offsets import (
    COMMITTED,
    EARLIEST,
    LATEST,
    InputRange,
    PartitionOffsets,
    input_ranges,
    partition_names,
    whats_gone,
    whats_moved_back,
)
from pyspark_kafkalog.read.admission import MinOffsets, backlog, limited
from pyspark_kafkalog.read.data_loss import Losses
from pyspark_kafkalog.read.group_publisher import Progress
from pyspark_kafkalog.read.neighbours import Neighbours
from pyspark_kafkalog.read.offset_reader import Lookup, connected
from pyspark_kafkalog.read.options import SourceOptions
from pyspark_kafkalog.read.partition_reader import PlannedRange
from pyspark_kafkalog.read.ranges import Split, most_splits, pack, record_count, split

log = get_logger(__name__)

NO_LIMIT = (1 << 63) - 1
_IDLE_WAIT_S = 0.2
_IDLE_WAIT_BESIDE_OTHERS_S = 0.02
_IDLE_PAUSE_S = 0.05
_IDLE_GAP_S = 0.05


class StreamSession:
    """The state of a stream since its start in this process.

    Attributes:
        available_now: the stream ends where the log ended at the first `next_position`.
        latest: the ends of the partitions at the last look.
        progress: publishes its position under its group.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.available_now = False
        self.latest: PartitionOffsets = {}
        self.progress = Progress(connected(options), options.group, options.selection.words())
        self._lookup = Lookup(options)
        self._losses = Losses(options.fail_on_data_loss)
        self._min_offsets = MinOffsets(options.min_offsets_per_trigger, options.max_trigger_delay_s, time.monotonic)
        self._initial: PartitionOffsets | None = None
        self._moving: set[TopicPartition] = set()
        self._hold_start = False
        self._leaves_out_unopened = False
        self._ends_unknown: set[TopicPartition] = set()
        self._went_on = False
        self._is_unread = False
        self._left_out: set[str] = set()  # what was logged already
        self._topic_ids: dict[str, bytes] = {}  # as this stream knows them; a topic created again has another
        self._asked_group: set[str] = set()  # for these topics
        self._group_said: dict[str, str] = {}
        self._outdated: dict[TopicPartition, bytes] = {}  # the group's possible offsets in replaced topics, by id
        # Where the topics start that the last look found made anew; of those partitions that the position has.
        self._again: PartitionOffsets = {}
        self._new_wait = False
        self._neighbours = Neighbours()
        self._wait_s = 0.0
        self._answered_s = -math.inf
        # AvailableNow's is taken at the first next_position: what is replayed before may end beyond the log's end now.
        self._target: PartitionOffsets | None = None
        self._ended_at: PartitionOffsets | None = None
        self._is_finished = False

    # --- where it starts -----------------------------------------------------------------------------------------

    def initial_position(self) -> PartitionOffsets:
        """The start of a stream with a new checkpoint; the same at every call."""
        if self._initial is None:

            def look(losses: Losses) -> tuple[PartitionOffsets, set[TopicPartition], bool]:
                partitions = self._lookup.partitions(may_lack_new=True)
                for partition, topic_id in partitions.items():
                    self._topic_ids.setdefault(partition.topic, topic_id)
                return self._lookup.stream_start(self.options.stream_start(), partitions)

            self._initial, self._moving, self._hold_start = self._lookup.asked_again(look, self._losses)
            today = dict(self._topic_ids)
            try:
                self._forget_of_deleted(today)
            except KafkalogError as error:
                self._tell_group_unseen(error)
                self.progress.after(lambda: self._forget_of_deleted(today, patient=False))
            if self.options.stream_start().position == COMMITTED and (consumer := self._lookup.live_consumer()):
                log.warning(
                    "group_has_live_consumers",
                    group=self.options.group,
                    first=consumer.name,
                    host=consumer.host,
                    effect="this query reads what they have not committed yet, and they do, too; stop them first",
                )
        return self._initial

    def _forget_of_deleted(self, today: Mapping[str, bytes], *, patient: bool = True) -> None:
        """Make the group forget its offsets in deleted topics: they do not belong to this newer checkpoint, and a
        restart would take them for this query's own."""
        had = self._lookup.group_offsets(today, patient=patient) if today else {}
        gone = {partition: was for partition, (_, was) in had.items() if was != today[partition.topic]}
        self._lookup.forget_group_offsets(gone, patient=patient)

    def _tell_group_unseen(self, error: KafkalogError) -> None:
        """Continue without the group's offsets if brokers are reachable but could not read them in time: their use at a
        start is no reason to fail. Raises any other error."""
        if isinstance(error, BrokerUnreachable) or not error.retriable:
            raise error
        log.warning(
            "group_not_looked_at",
            group=self.options.group,
            reason=str(error),
            effect="a topic that was deleted and created again while this query did not run is not noticed",
        )

    # --- how far it goes -----------------------------------------------------------------------------------------

    def next_position(
        self, position: PartitionOffsets, max_offsets: int = NO_LIMIT, *, everything: bool = False
    ) -> PartitionOffsets:
        """The end of the next micro-batch; the position itself if there is none.

        Args:
            max_offsets: the largest number of records.
            everything: ignore the limits of the options, too (Trigger.Once).
        """
        can_wait = not (everything or self.available_now)
        if can_wait:
            self._wait_s = self._idle_wait_s()
        try:
            end = self._next_position(position, max_offsets, everything)
            return self._after_forgetting(position, end, can_wait)
        finally:
            if can_wait:
                self._neighbours.answered()
            self._answered_s = time.monotonic()

    def _idle_wait_s(self) -> float:
        """How long a call may wait for records, asked once at its start.

        Spark asks the sources of a query one after the other: while one waits for records, those of the others wait,
        too. So kafkalog's sources of a query find each other (`neighbours.py`) and share one short wait. Where more
        than Spark's pause of 10 ms has passed since the last answer, the query is busy: nothing is waited for.
        """
        others = self._neighbours.asked()
        if time.monotonic() - self._answered_s >= _IDLE_GAP_S:
            return 0.0
        return _IDLE_WAIT_BESIDE_OTHERS_S / others if others else _IDLE_WAIT_S

    def _next_position(self, position: PartitionOffsets, max_offsets: int, everything: bool) -> PartitionOffsets:
        self._is_unread = position == self._initial and not self._went_on
        latest = self._look(position, is_last=everything or (self.available_now and self._target is None))
        self._went_on = True
        self._publish(position, latest)
        if self.available_now:
            latest = self._up_to_target(latest)
        if self._hold_start:
            self._hold_start = False
            if position == self._initial:
                self._min_offsets.admits(0)
                fixed = latest.keys() - self._moving if everything else ()  # Trigger.Once has no other micro-batch
                return {**position, **{partition: latest[partition] for partition in fixed}}
        if (back := self._gone_back(position, latest)) != position:
            return back
        if everything:
            return latest or position
        if not self.available_now:
            latest = self._awaited(position, latest)
        return self._within_limits(position, latest, max_offsets) or position  # never {} once there was a partition

    def _awaited(self, position: PartitionOffsets, latest: PartitionOffsets) -> PartitionOffsets:
        """Wait until there is enough for a micro-batch, and return the partitions' ends; after a while the position.

        Otherwise an idle stream would ask 90 times a second: Spark's pause between two calls is 10 ms.
        """
        deadline = time.monotonic() + self._wait_s
        while True:
            admits = self._min_offsets.admits(sum(backlog(self._with_new(position, latest), latest).values()))
            if admits and latest != position:
                return latest
            asked = time.monotonic()
            if asked >= deadline:
                return position
            before = latest
            self._lookup.wait(latest, deadline - asked)
            latest = self._look(position)
            if (back := self._gone_back(position, latest)) != position:
                return back
            if latest == before:
                # No news, and perhaps no wait: a broker with too many waiting calls answers at once, and so does one
                # that fails. Brokers do not notify clients when that is over, so this asks again after 50 ms.
                time.sleep(max(0.0, min(asked + _IDLE_PAUSE_S, deadline) - time.monotonic()))

    def _within_limits(
        self, position: PartitionOffsets, latest: PartitionOffsets, max_offsets: int
    ) -> PartitionOffsets:
        """The end by both limits: in each partition the smaller one."""
        max_bytes = self.options.max_bytes_per_trigger
        start = self._with_new(position, latest)
        if max_bytes is None and sum(backlog(start, latest).values()) <= max_offsets:
            return latest
        if not self.options.fail_on_data_loss:
            # Only existing records count for a share: a recovered partition has a gap of 10 million offsets.
            earliest = self._lookup.at(EARLIEST, backlog(start, latest))
            start = {**start, **{p: min(max(start[p], offset), latest[p]) for p, offset in earliest.items()}}
        end = limited(start, latest, max_offsets)
        if max_bytes is not None:
            by_bytes = self._lookup.limited_by_bytes(start, latest, max_bytes)
            end = {partition: min(offset, by_bytes[partition]) for partition, offset in end.items()}
        return end

    def _with_new(self, position: PartitionOffsets, latest: PartitionOffsets) -> PartitionOffsets:
        """The position, with missing partitions added at their first record."""
        new = sorted(latest.keys() - position.keys())
        return {**dict.fromkeys(new, 0), **self._lookup.earliest_of_those_there(new), **position} if new else position

    def _gone_back(self, position: PartitionOffsets, latest: PartitionOffsets) -> PartitionOffsets:
        """The position, with the starts of topics that were created again: an empty micro-batch records them before any
        of their records is read, whatever the limits are."""
        if not self._again:
            return position
        return {p: self._again.get(p, offset) for p, offset in position.items() if p in latest}

    def has_ended(self, position: PartitionOffsets, end: PartitionOffsets) -> bool:
        """Whether this is AvailableNow's last call: Spark ends this process after its answer. The first call of a new
        checkpoint is not the last, because a micro-batch of its own records the start."""
        return self.available_now and end == position and not self._is_unread

    def finish(self, position: PartitionOffsets) -> None:
        """Publish the last position and leave the group; once, for other sources of the query may go on. If that fails,
        Spark's next calls try again."""
        if self._ended_at != position:
            self._ended_at = dict(position)
            self._is_finished = self.progress.finish()
        elif not self._is_finished:
            self._is_finished = self.progress.finish_again()

    def _publish(self, position: PartitionOffsets, latest: PartitionOffsets) -> None:
        """Publish the position under the group, for topics that exist.

        A start is not published before the first micro-batch has succeeded: a query that fails there has read nothing,
        and `committed` would then skip records that were never read.
        """
        if position == self._ended_at:
            return
        there = {p: offset for p, offset in position.items() if p in latest and p not in self._again}
        self.progress.at({} if self._is_unread else there, self._topic_ids)

    def done(self, end: PartitionOffsets) -> None:
        """Note the end of a micro-batch. It is not a position in a topic that was deleted, or created again, since."""
        if end != self._ended_at:  # else it would become a member of its group again
            self.progress.done({p: offset for p, offset in end.items() if p in self.latest and p not in self._again})

    def _up_to_target(self, latest: PartitionOffsets) -> PartitionOffsets:
        """The end of AvailableNow: the log's end at the first call, if the log still has it."""
        if self._target is None:
            self._target = latest
        else:
            self._check_has({**latest, **self._again}, self._target)
        return self._target

    def _check_has(self, latest: PartitionOffsets, wanted: PartitionOffsets) -> None:
        """Raises DataLost if records for AvailableNow are missing from the log, whatever failOnDataLoss is."""
        for lost in (*whats_gone(wanted, latest), *whats_moved_back(wanted, latest)):
            raise DataLost(reason=f"{lost}; Trigger.AvailableNow must read it, whatever failOnDataLoss is")

    # --- what is there -------------------------------------------------------------------------------------------

    def _look(self, position: PartitionOffsets, *, is_last: bool = False) -> PartitionOffsets:
        """The current ends of the selected partitions; a loss is checked again before it is accepted.

        Args:
            is_last: no later look decides what is read.
        """
        self.latest = self._lookup.asked_again(lambda losses: self._checked(position, losses, is_last), self._losses)
        return self.latest

    def _checked(self, position: PartitionOffsets, losses: Losses, is_last: bool) -> PartitionOffsets:
        position = self._selected(position)
        # A topic that is not in the position counts as new, whichever topic had the name before.
        topics = {partition.topic for partition in position}
        self._topic_ids = {topic: topic_id for topic, topic_id in self._topic_ids.items() if topic in topics}
        partitions, made_anew = self._partitions(position, losses)
        unopened = self._unopened(partitions.keys() - position.keys())
        partitions = {partition: partitions[partition] for partition in partitions if partition not in unopened}
        latest = self._ends(position, partitions, may_wait=is_last or bool(made_anew))
        for lost in (*whats_gone(position, latest), *whats_moved_back(position, latest)):
            losses.found(lost)
        new = sorted(latest.keys() - position.keys())
        earliest = self._earliest_of_new(new, losses)
        for partition in new:
            if partition not in earliest:
                del latest[partition]
        again = [partition for partition in latest if partition.topic in made_anew and partition in position]
        self._again = self._lookup.at(EARLIEST, again)
        self._outdated.update({p: self._topic_ids[p.topic] for p in position if p.topic in made_anew})
        for partition in partitions:
            self._topic_ids[partition.topic] = partitions[partition]
        return latest

    def _ends(
        self, position: PartitionOffsets, partitions: Iterable[TopicPartition], *, may_wait: bool
    ) -> PartitionOffsets:
        """The current ends of partitions. A new leader does not know at once up to where the last one let readers read.
        If this may not wait for that, the partition ends where it was last seen to: it has nothing new yet. A new one
        is left out, to be read later."""
        if may_wait:
            return self._lookup.at(LATEST, partitions)
        ends = self._lookup.known_ends(partitions)
        unknown = set(partitions) - ends.keys()
        if unknown and unknown != self._ends_unknown:
            log.info("ends_not_known_yet", partitions=partition_names(unknown))
        self._ends_unknown = unknown
        seen = {p: max(position[p], self.latest.get(p, 0)) for p in unknown if p in position}
        return {p: end for p in partitions if (end := ends.get(p, seen.get(p))) is not None}

    def _unopened(self, new: AbstractSet[TopicPartition]) -> set[TopicPartition]:
        """New partitions to be read later: their logs are being opened, which may take half a minute for a large topic,
        and the other partitions do not wait for that. AvailableNow waits, because it ends with this look."""
        unopened = self._lookup.unopened(new) if new and not self.available_now else set()
        if unopened and not self._leaves_out_unopened:
            log.info("left_out_until_opened", partitions=partition_names(unopened))
        self._leaves_out_unopened = bool(unopened)
        return unopened

    def _selected(self, logged: PartitionOffsets) -> PartitionOffsets:
        """The logged offsets of partitions that the options select. Others may still exist: they are not read, and are
        not a loss.

        Raises:
            CheckpointOfOthers: there are others, and failOnDataLoss is true.
        """
        selection = self.options.selection
        taken = {partition: offset for partition, offset in logged.items() if selection.takes(partition)}
        if len(taken) < len(logged):
            names = partition_names(logged.keys() - taken.keys())
            if self.options.fail_on_data_loss:
                raise CheckpointOfOthers(checkpoint=names, options=selection.words("="))
            if names not in self._left_out:
                self._left_out.add(names)
                log.warning("left_out_of_the_checkpoint", partitions=names, options=selection.words("="))
        return taken

    def _partitions(self, known: PartitionOffsets, losses: Losses) -> tuple[dict[TopicPartition, bytes], set[str]]:
        """The selected partitions, and their topics that were created again since they were last seen here."""

        def missing(error: UnknownTopic) -> None:
            topic = error.facts["topic"]
            if any(partition.topic == topic for partition in known):
                losses.found(f"topic '{topic}', which the stream reads, was deleted")
            else:
                losses.found(str(error), error)

        partitions = self._lookup.partitions(missing, may_lack_new=True)
        self._see_group(known, {partition.topic: topic_id for partition, topic_id in partitions.items()})
        made_anew = {
            partition.topic
            for partition, topic_id in partitions.items()
            if self._topic_ids.get(partition.topic, topic_id) != topic_id
        }
        for topic in sorted(made_anew):
            losses.found(f"topic '{topic}' was deleted and created again{self._group_said.get(topic, '')}")
        return partitions, made_anew

    def _see_group(self, known: PartitionOffsets, today: Mapping[str, bytes]) -> None:
        """Find the topics that were created again since the stream last read them in another process. A checkpoint has
        no ids of topics; the offsets that the stream published under its group have them."""
        unseen = {partition.topic for partition in known if partition.topic in today} - self._asked_group
        unseen -= self._topic_ids.keys()
        if not unseen:
            return
        self._asked_group |= unseen
        try:
            found = self._lookup.group_offsets(unseen)
        except KafkalogError as error:
            self._tell_group_unseen(error)
            return
        for topic in unseen:
            had = {p: each for p, each in found.items() if p.topic == topic and p in known}
            if had and all(topic_id != today[topic] for _, topic_id in had.values()):
                partition, (offset, topic_id) = min(had.items())
                self._topic_ids[topic] = topic_id
                self._outdated.update({each: was for each, (_, was) in had.items()})
                self._group_said[topic] = _other_topic_before(self.options.group, partition, offset)

    def _after_forgetting(self, position: PartitionOffsets, end: PartitionOffsets, can_wait: bool) -> PartitionOffsets:
        """The end of a micro-batch, after the group has forgotten its offsets in deleted topics. This concerns names of
        topics that are new to this stream, or that it has restarted, with the restart in its checkpoint. Otherwise a
        restart would take the old offsets for this stream's own.

        Args:
            can_wait: leave those topics out while the group cannot be reached; a later look handles them.
        """
        new = {partition.topic for partition in end} - {partition.topic for partition in position}
        begun = {p: was for p, was in self._outdated.items() if self._again.get(p, position.get(p)) == position.get(p)}
        if not new and not begun:
            return end
        patient = not can_wait
        try:
            had = self._lookup.group_offsets(new, patient=patient) if new else {}
            others = {p: was for p, (_, was) in had.items() if was != self._topic_ids[p.topic]}
            self._lookup.forget_group_offsets({**begun, **others}, patient=patient)
        except KafkalogError as error:
            if patient or not error.retriable:
                raise
            waiting = new | {partition.topic for partition in begun}
            if not self._new_wait:
                self._new_wait = True
                log.warning(
                    "new_topics_wait", topics=", ".join(sorted(waiting)), group=self.options.group, reason=str(error)
                )
            return {p: position.get(p, o) if p.topic in waiting else o for p, o in end.items() if p.topic not in new}
        self._new_wait = False
        self._outdated = {p: was for p, was in self._outdated.items() if p not in begun}
        return end

    def _earliest_of_new(self, new: list[TopicPartition], losses: Losses) -> PartitionOffsets:
        """The starts of partitions that are new to the stream; deleted ones are left out."""
        earliest = self._lookup.earliest_of_those_there(new) if new else {}
        if gone := set(new) - earliest.keys():
            losses.found(f"{partition_names(gone)}, new to the stream, disappeared before the first offset was known")
        for partition, offset in sorted(earliest.items()):
            if offset > 0:
                losses.found(f"partition {partition}, new to the stream, starts at {offset}, not at 0")
        return earliest

    # --- what its tasks read -------------------------------------------------------------------------------------

    def planned(self, start: PartitionOffsets, end: PartitionOffsets) -> list[list[PlannedRange]]:
        """A micro-batch's splits: between two positions, as they were logged.

        The micro-batch that a restart repeats is planned before the first `next_position`. It may take long, so the
        stream is a member of its group from then on.
        """
        start, end = self._selected(start), self._selected(end)
        if self._target is not None and end != self._initial:
            self._check_end(self._target, start, end)
        # A first batch that is planned again after a restart ends at its logged end, which may be before the start that
        # is looked up again. The records between are not lost, because the next batch starts at that end.
        if not (start == self._initial and not self._went_on):
            for lost in (*whats_gone(start, end), *whats_moved_back(start, end)):
                self._losses.found(lost)
        ranges, topic_ids = self._lookup.asked_again(lambda losses: self._ranges(start, end, losses), self._losses)
        self.progress.begin()
        leaders = {each.partition: self._lookup.leader(each.partition, topic_ids[each.partition]) for each in ranges}
        return [
            [PlannedRange(each, topic_ids[each.partition], leader=leaders[each.partition]) for each in one_split]
            for one_split in self._splits(ranges)
        ]

    def _splits(self, ranges: list[InputRange]) -> list[Split]:
        """Ranges, cut and packed as the options say."""
        options = self.options
        splits: list[Split] = [
            [each] for each in split(ranges, options.min_partitions, options.max_records_per_partition)
        ]
        most = most_splits(
            record_count(ranges),
            options.min_partitions,
            options.max_input_partitions,
            options.min_records_per_partition,
        )
        if most is not None and len(splits) > most:
            splits = pack([(each, record_count(each)) for each in splits], most)
        return splits

    def _check_end(self, target: PartitionOffsets, start: PartitionOffsets, end: PartitionOffsets) -> None:
        """Raises DataLost if a micro-batch of AvailableNow has an impossible end, whatever failOnDataLoss is. The
        micro-batch that goes back to the start of a topic made anew leaves out what is new: the next ones read it."""
        if end.keys() - target.keys() or (target.keys() - end.keys()) & start.keys():
            raise DataLost(
                reason=f"a micro-batch of Trigger.AvailableNow ends in {partition_names(end)}, but the target is "
                f"{partition_names(target)}"
            )
        for partition, offset in sorted(end.items()):
            if offset > target[partition]:
                raise DataLost(
                    reason=f"a micro-batch of Trigger.AvailableNow ends at offset {offset} of {partition}, but the "
                    f"target is {target[partition]}"
                )

        def look(losses: Losses) -> None:
            self._check_has(self._ends(end, self._partitions(end, losses)[0], may_wait=False), end)

        self._lookup.asked_again(look, Losses(fail=False))  # the check then reports what is missing

    def _ranges(
        self, start: PartitionOffsets, end: PartitionOffsets, losses: Losses
    ) -> tuple[list[InputRange], dict[TopicPartition, bytes]]:
        """The existing ranges between two positions, and the ids of their topics."""
        new = sorted(partition for partition, offset in end.items() if partition not in start and offset > 0)
        known = {partition: end[partition] for partition in end if partition not in new}
        partitions, made_anew = self._partitions(known, losses)
        for partition in end.keys() & partitions.keys():  # a replay comes before the first look
            self._topic_ids.setdefault(partition.topic, partitions[partition])
        earliest = self._earliest_of_new(new, losses)
        there = {partition: offset for partition, offset in end.items() if partition in start or partition in earliest}
        ranges = input_ranges({**earliest, **start}, there)
        gone = [each.partition for each in ranges if each.partition not in partitions]
        if gone:
            losses.found(f"the batch reads {partition_names(gone)}, deleted since")
        left = [each for each in ranges if each.partition in partitions and each.partition.topic not in made_anew]
        return left, partitions


def _other_topic_before(group: str, partition: TopicPartition, offset: int) -> str:
    """What the error adds about a topic that was made anew while the stream did not run: how the group shows it, and
    what to do if the group is wrong."""
    return (
        f": group {group} has offset {offset} of {partition} in the deleted topic. If another query committed it and "
        "this checkpoint is of the new topic (the query's group has changed), run "
        f"`kafkalog groups reset {shlex.quote(group)} --topic {partition.topic} --to latest` and start the query "
        "again: it continues from its checkpoint"
    )
