"""Plans a batch on the driver: the ranges of its partitions, cut into splits.

A batch is bound late: its partitions carry earliest and latest as symbols that each task looks up when it reads,
because Spark plans a DataFrame once and may run the plan many times.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kafkalog.records import TopicPartition
from pyspark_kafkalog.offsets import EARLIEST, LATEST, InputRange, check_order
from pyspark_kafkalog.read.data_loss import Losses
from pyspark_kafkalog.read.offset_reader import Lookup
from pyspark_kafkalog.read.options import SourceOptions
from pyspark_kafkalog.read.partition_reader import PlannedRange
from pyspark_kafkalog.read.ranges import Split, most_splits, pack, record_count, split_late_bound


def planned_batch(options: SourceOptions) -> list[list[PlannedRange]]:
    """A batch's splits. Their ranges have symbols where the options say so."""
    lookup = Lookup(options)
    ranges, topic_ids = lookup.asked_again(lambda _: _ranges(lookup), Losses(fail=True))
    splits = split_late_bound(
        ranges, lambda: _numbers(lookup, ranges), options.min_partitions, options.max_records_per_partition
    )
    fewest = 1 if options.min_records_per_partition is not None else options.max_input_partitions
    if fewest is not None and len(splits) > max(fewest, options.min_partitions or 1):
        splits = _packed(lookup, splits)
    whole = set(ranges)
    leaders = {partition: lookup.leader(partition, topic_id) for partition, topic_id in topic_ids.items()}
    return [
        [PlannedRange(each, is_piece=each not in whole, leader=leaders[each.partition]) for each in one_split]
        for one_split in splits
    ]


def _ranges(lookup: Lookup) -> tuple[list[InputRange], dict[TopicPartition, bytes]]:
    """A range for each partition that is read, with symbols as the options have them, and its topic's id."""
    start, end = lookup.options.batch_bounds()
    partitions = lookup.partitions()
    starts = lookup.start(start, partitions)
    ends = lookup.end(end, partitions)
    check_order(start, end, "offset", starts, ends)
    return [InputRange(partition, starts[partition], ends[partition]) for partition in partitions], partitions


def _packed(lookup: Lookup, splits: list[Split]) -> list[Split]:
    """Fewer splits, by the records that there are now."""
    options = lookup.options
    numbers = iter(_numbers(lookup, [each for one_split in splits for each in one_split]))
    counts = [record_count(list(itertools.islice(numbers, len(each)))) for each in splits]
    most = most_splits(
        sum(counts), options.min_partitions, options.max_input_partitions, options.min_records_per_partition
    )
    assert most is not None
    return pack(list(zip(splits, counts, strict=True)), most) if len(splits) > most else splits


def _numbers(lookup: Lookup, ranges: Sequence[InputRange]) -> list[InputRange]:
    """Ranges with their symbols replaced by current offsets; the start is looked up before the end."""
    earliest = lookup.at(EARLIEST, {each.partition for each in ranges if each.start == EARLIEST})
    latest = lookup.at(LATEST, {each.partition for each in ranges if each.end == LATEST})
    return [
        each._replace(
            start=earliest[each.partition] if each.start == EARLIEST else each.start,
            end=latest[each.partition] if each.end == LATEST else each.end,
        )
        for each in ranges
    ]
