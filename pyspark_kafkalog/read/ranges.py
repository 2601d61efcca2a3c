"""Cutting offset ranges into input splits: minPartitions and maxRecordsPerPartition by the algorithm of Spark's Kafka
connector, and packing several ranges into one split for maxInputPartitions and minRecordsPerPartition. Pure.

The ranges of a batch query are bound late: if a range is cut, the start of its first piece and the end of its last one
stay symbolic. A partition that had no record when the plan was made is added to another split, because it may have
records when Spark runs the plan again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspark_kafkalog.offsets import InputRange

Split = list[InputRange]
"""The ranges that one task reads, one after the other."""


def split_evenly(whole: InputRange, parts: int) -> list[InputRange]:
    """Cut a range into parts of almost the same size, the last one the largest."""
    pieces = []
    start, left = whole.start, whole.end - whole.start
    for part in range(parts):
        size = left // (parts - part)
        if size:
            pieces.append(InputRange(whole.partition, start, start + size))
        start += size
        left -= size
    return pieces


def split(
    ranges: Sequence[InputRange], min_partitions: int | None, max_records_per_partition: int | None
) -> list[InputRange]:
    """Ranges that have records, cut so that none has too many and there are about enough of them.

    First a range of more than `max_records_per_partition` is cut into so many even pieces as that takes. If there are
    still fewer pieces than `min_partitions`, those whose share of `min_partitions` is below 1.5 stay whole, and the
    others share the rest in proportion to their size.
    """
    pieces = list(ranges)
    if max_records_per_partition is not None:
        pieces = [
            piece
            for each in pieces
            for piece in split_evenly(each, -(-_size(each) // max_records_per_partition))  # rounded up
        ]
    if min_partitions is None or len(pieces) >= min_partitions:
        return pieces
    total = sum(map(_size, pieces))
    whole = [each for each in pieces if _part_count(_size(each), total, min_partitions) == 1]
    rest = total - sum(map(_size, whole))
    wanted = max(min_partitions - len(whole), 1)
    kept = set(whole)
    return [
        piece
        for each in pieces
        for piece in split_evenly(each, 1 if each in kept else _part_count(_size(each), rest, wanted))
    ]


def _size(each: InputRange) -> int:
    return each.end - each.start


def record_count(ranges: Sequence[InputRange]) -> int:
    return sum(max(0, each.end - each.start) for each in ranges)


def _part_count(size: int, total: int, parts: int) -> int:
    """parts * size / total, rounded half up, at least 1."""
    return max((2 * parts * size + total) // (2 * total), 1)


def split_late_bound(
    ranges: Sequence[InputRange],
    resolve: Callable[[], Sequence[InputRange]],
    min_partitions: int | None,
    max_records_per_partition: int | None,
) -> list[Split]:
    """A batch's splits, the ranges' symbols kept. Ranges without a record count when `min_partitions` is compared.

    Args:
        resolve: the same ranges with numbers; asked only if something is to be cut.
    """
    if max_records_per_partition is None and (min_partitions is None or min_partitions <= len(ranges)):
        return [[each] for each in ranges]
    numbers = [each for each in resolve() if each.end > each.start]
    by_partition: dict[object, list[InputRange]] = {}
    for piece in split(numbers, min_partitions, max_records_per_partition):
        by_partition.setdefault(piece.partition, []).append(piece)
    splits: list[Split] = []
    empty: Split = []
    for each in ranges:
        pieces = by_partition.get(each.partition)
        if pieces is None:
            empty.append(each)
            continue
        pieces[0] = pieces[0]._replace(start=each.start)
        pieces[-1] = pieces[-1]._replace(end=each.end)
        splits += [[piece] for piece in pieces]
    if empty:
        if splits:
            splits[-1] += empty
        else:
            splits.append(empty)
    return splits


def most_splits(
    records: int, min_partitions: int | None, max_splits: int | None, min_records_per_partition: int | None
) -> int | None:
    """How many splits a read of so many records may have; None: any number."""
    if min_records_per_partition is None:
        return max_splits
    of_records = max(records // min_records_per_partition, min_partitions or 1)
    return of_records if max_splits is None else min(max_splits, of_records)


def pack(splits: Sequence[tuple[Split, int]], max_splits: int) -> list[Split]:
    """At most `max_splits` splits of almost the same number of records, of splits given with theirs.

    The largest goes first, each to where there is least; where there is as little, to where there are the fewest.
    """
    bins: list[tuple[int, list[int]]] = [(0, []) for _ in range(min(max_splits, len(splits)))]
    for number in sorted(range(len(splits)), key=lambda number: -splits[number][1]):
        least = min(range(len(bins)), key=lambda at: (bins[at][0], len(bins[at][1])))
        records, numbers = bins[least]
        bins[least] = records + splits[number][1], [*numbers, number]
    return [[each for number in sorted(numbers) for each in splits[number][0]] for _, numbers in bins]
