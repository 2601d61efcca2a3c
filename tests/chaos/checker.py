"""The anomalies of a history, by the names that Jepsen's tests of Kafka have for them. Pure.

| anomaly              | means                                                                                        |
|----------------------|----------------------------------------------------------------------------------------------|
| lost-write           | acknowledged or read, and not there at the end; so with a batch that is in the log           |
| duplicate            | a value at two offsets; two attempts of one batch                                            |
| unseen               | there at the end, and handed to no consumer                                                  |
| aborted-read         | a value was read whose write failed for certain                                              |
| unexpected           | a value was read that nobody had begun to write to that partition                            |
| inconsistent-offsets | two values at one offset, by all reads and acks ever; a value that is not where its ack said |
| poll-skip            | a reader was handed a record, but not one before it                                          |
| nonmonotonic-poll    | a reader was handed a record again, or an earlier one                                        |
| nonmonotonic-send    | values of a client are in another order than it sent them                                    |
| torn                 | one part of an attempt of a batch is there at the end, and another is not                    |
| stale-end            | a latest offset is lower than one that was reported, or than a record that was read, before  |

Reads of the end must cover partitions from their first offset. Readers must have had the time to come to the end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kafkalog.records import TopicPartition
from tests.chaos.history import NO_OFFSET, Operation

_SHOWN = 5


class Anomaly(NamedTuple):
    name: str
    text: str


Batch = tuple[str, int]
"""A client and the number of its batch."""


@dataclass
class _Written:
    """A value that somebody began to write."""

    client: str
    partition: TopicPartition
    order: int  # in which it was written, over all clients
    run: str = ""  # the attempt of a batch
    outcome: str = "info"
    acked_at: int | None = None


class _Known:
    """What a history says, arranged for the rules."""

    def __init__(self) -> None:
        self.values: dict[str, _Written] = {}
        self.attempts: dict[str, list[str]] = defaultdict(list)  # run -> its values
        self.batches: dict[Batch, list[str]] = defaultdict(list)  # -> the runs that are attempts of it
        self.in_log: set[Batch] = set()
        self.at: dict[TopicPartition, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.seen: dict[TopicPartition, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))  # polled or read
        self.polled: dict[TopicPartition, set[str]] = defaultdict(set)
        self.readings: dict[tuple[str, str, TopicPartition], list[int]] = defaultdict(list)
        self.end: dict[TopicPartition, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))

    def add(self, operation: Operation) -> None:
        getattr(self, f"_{operation.what}")(operation)

    def _begin(self, operation: Operation) -> None:
        for _, value in operation.records:
            self.values[value] = _Written(operation.client, operation.partition, len(self.values), operation.run)

    def _send(self, operation: Operation) -> None:
        if operation.outcome == "invoke":
            self._begin(operation)
            return
        for offset, value in operation.records:
            self.values[value].outcome = operation.outcome
            if operation.outcome == "ok" and offset != NO_OFFSET:
                self.values[value].acked_at = offset
                self.at[operation.partition][offset].add(value)

    def _stage(self, operation: Operation) -> None:
        self._begin(operation)
        self.attempts[operation.run] += [value for _, value in operation.records]
        runs = self.batches[operation.client, operation.number]
        if operation.run not in runs:
            runs.append(operation.run)

    def _commit(self, operation: Operation) -> None:
        if operation.outcome == "invoke":
            return
        for value in self.attempts[operation.run]:
            self.values[value].outcome = operation.outcome
        if operation.outcome == "ok":
            self.in_log.add((operation.client, operation.number))

    def _batch(self, operation: Operation) -> None:
        self.in_log.add((operation.client, operation.number))

    def _assign(self, operation: Operation) -> None:
        self.readings[operation.client, operation.run, operation.partition] = [operation.number - 1]

    def _poll(self, operation: Operation) -> None:
        self._see(operation)
        self.polled[operation.partition].update(value for _, value in operation.records)
        reading = self.readings[operation.client, operation.run, operation.partition]
        reading += [offset for offset, _ in operation.records]

    def _read(self, operation: Operation) -> None:
        self._see(operation)
        for offset, value in operation.records:
            self.end[operation.partition][value].append(offset)

    def _see(self, operation: Operation) -> None:
        at, seen = self.at[operation.partition], self.seen[operation.partition]
        for offset, value in operation.records:
            at[offset].add(value)
            seen[value].add(offset)

    def _latest(self, operation: Operation) -> None:
        """Looked at by `_stale_ends`."""

    def there(self, run: str) -> list[str]:
        """The values of an attempt that are there at the end."""
        return [value for value in self.attempts[run] if value in self.end[self.values[value].partition]]


def check(operations: Iterable[Operation], may_repeat: Collection[str] = ()) -> list[Anomaly]:
    """The anomalies of a whole history, sorted.

    Args:
        operations: in the order of time.
        may_repeat: clients that are not idempotent: their values may be there twice, and in another order.
    """
    listed = list(operations)
    known = _Known()
    for operation in listed:
        known.add(operation)
    found = {
        *_lost_writes(known),
        *_duplicates(known, may_repeat),
        *_unseen(known),
        *_wrong_reads(known),
        *_inconsistent_offsets(known),
        *_wrong_polls(known),
        *_nonmonotonic_sends(known, may_repeat),
        *_torn(known),
        *_stale_ends(listed),
    }
    return sorted(found)


def summary(anomalies: Collection[Anomaly]) -> str:
    """How many of each name there are, and the first few of them."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for anomaly in anomalies:
        by_name[anomaly.name].append(anomaly.text)
    lines: list[str] = []
    for name, texts in by_name.items():
        lines += [f"{name}: {len(texts)}", *(f"    {text}" for text in texts[:_SHOWN])]
    return "\n".join(lines)


def _lost_writes(known: _Known) -> Iterator[Anomaly]:
    for value, written in known.values.items():
        if value in known.end[written.partition]:
            continue
        if written.outcome == "ok":
            where = "" if written.acked_at is None else f" at {written.acked_at}"
            yield Anomaly("lost-write", f"{written.partition}: {value} of {written.client} was acknowledged{where}")
        elif value in known.seen[written.partition]:
            offsets = sorted(known.seen[written.partition][value])
            yield Anomaly("lost-write", f"{written.partition}: {value} of {written.client} was read at {offsets}")
    for client, number in known.in_log:
        if not any(known.there(run) for run in known.batches[client, number]):
            yield Anomaly("lost-write", f"batch {number} of {client} is in the log, and no attempt of it is there")


def _duplicates(known: _Known, may_repeat: Collection[str]) -> Iterator[Anomaly]:
    for partition, places in known.seen.items():
        for value, offsets in places.items():
            written = known.values.get(value)
            if len(offsets) > 1 and (written is None or written.client not in may_repeat):
                yield Anomaly("duplicate", f"{partition}: {value} is at {sorted(offsets)}")
    for (client, number), runs in known.batches.items():
        there = [run for run in runs if known.there(run)]
        if len(there) > 1:
            yield Anomaly("duplicate", f"batch {number} of {client} is there by the attempts {', '.join(there)}")


def _unseen(known: _Known) -> Iterator[Anomaly]:
    for partition, values in known.end.items():
        for value, offsets in values.items():
            if value not in known.polled[partition]:
                yield Anomaly("unseen", f"{partition}: {value} at {offsets} was handed to no consumer")


def _wrong_reads(known: _Known) -> Iterator[Anomaly]:
    for partition, places in known.seen.items():
        for value, offsets in places.items():
            written = known.values.get(value)
            if written is None or written.partition != partition:
                yield Anomaly("unexpected", f"{partition}: {value} at {sorted(offsets)} was not written there")
            elif written.outcome == "fail":
                failed = f"{written.client} {written.run}".strip()
                yield Anomaly("aborted-read", f"{partition}: {value} at {sorted(offsets)}, of {failed}, had failed")


def _inconsistent_offsets(known: _Known) -> Iterator[Anomaly]:
    for partition, at in known.at.items():
        for offset, values in at.items():
            if len(values) > 1:
                yield Anomaly("inconsistent-offsets", f"{partition}: {offset} has {', '.join(sorted(values))}")
    for value, written in known.values.items():
        offsets = known.seen[written.partition].get(value)
        if offsets and written.acked_at is not None and written.acked_at not in offsets:
            text = f"{written.partition}: {value} was acknowledged at {written.acked_at} and read at {sorted(offsets)}"
            yield Anomaly("inconsistent-offsets", text)


def _wrong_polls(known: _Known) -> Iterator[Anomaly]:
    offsets = {partition: sorted(at) for partition, at in known.at.items()}
    for (client, run, partition), handed_out in known.readings.items():
        there = offsets.get(partition, [])
        for before, offset in pairwise(handed_out):
            between = there[bisect_right(there, before) : bisect_left(there, offset)]
            if offset <= before:
                yield Anomaly("nonmonotonic-poll", f"{partition}: {client} {run} was handed {offset} after {before}")
            elif between:
                text = f"{partition}: {client} {run} was handed {offset} after {before}, and not {between[:_SHOWN]}"
                yield Anomaly("poll-skip", text)


def _nonmonotonic_sends(known: _Known, may_repeat: Collection[str]) -> Iterator[Anomaly]:
    for partition, values in known.end.items():
        last: dict[str, tuple[int, str]] = {}
        for value, _ in sorted(values.items(), key=lambda item: min(item[1])):
            written = known.values.get(value)
            if written is None or written.client in may_repeat:
                continue
            before, earlier = last.get(written.client, (-1, ""))
            if written.order < before:
                yield Anomaly("nonmonotonic-send", f"{partition}: {written.client} sent {value} before {earlier}")
            last[written.client] = written.order, value


def _torn(known: _Known) -> Iterator[Anomaly]:
    for (client, number), runs in known.batches.items():
        for run in runs:
            there, values = known.there(run), known.attempts[run]
            if 0 < len(there) < len(values):
                text = f"batch {number} of {client}, attempt {run}: {len(there)} of {len(values)} values are there"
                yield Anomaly("torn", text)


def _stale_ends(operations: Iterable[Operation]) -> Iterator[Anomaly]:
    """An end that was asked for after something was known must have been at least that far."""
    known: dict[TopicPartition, list[tuple[int, int, str]]] = defaultdict(list)  # (time, at least, why), both rising
    for operation in operations:
        if operation.what == "latest":
            at_least, why = operation.number, f"{operation.client} was told {operation.number}"
        elif operation.what == "poll" and operation.records:
            offset = operation.records[-1][0]
            at_least, why = offset + 1, f"{operation.client} was handed {offset}"
        else:
            continue
        before = known[operation.partition]
        if operation.what == "latest" and (passed := bisect_left(before, (operation.since_ns,))):
            _, least, reason = before[passed - 1]
            if operation.number < least:
                text = f"{operation.partition}: {operation.client} was told {operation.number} after {reason}"
                yield Anomaly("stale-end", text)
        if not before or before[-1][1] < at_least:
            before.append((operation.time_ns, at_least, why))
