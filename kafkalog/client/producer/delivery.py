"""Handles of sent records. They are light: a reference to the record's batch, and its place in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kafkalog.client.producer.accumulator import Accumulator
from kafkalog.client.producer.queue import Batch
from kafkalog.errors import KafkalogError
from kafkalog.records import RecordMetadata, TopicPartition


class Delivery:
    """The outcome of one record. Made without arguments and filled in by `Producer.send`, which is the cheapest way to
    make an object of two fields: 0.08 us, where a constructor takes 0.15 and a `Future` 1 to 3."""

    __slots__ = ("_batch", "_index")

    _batch: Batch
    _index: int

    def done(self) -> bool:
        """Whether it was acknowledged or has failed."""
        return self._batch.done

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Wait for the ack and return the record's place in the log. Its batch is sent without further lingering.

        Raises:
            RequestTimedOut: it was not acknowledged within `timeout` seconds.
            KafkalogError: why it could not be delivered.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._batch.metadata(self._index)

    def exception(self, timeout: float | None = None) -> KafkalogError | None:
        """Why it could not be delivered, None if it was. Waits as `result` does."""
        batch = self._batch
        if not batch.done:
            _wait([Run(batch, self._index, 1)], timeout)
        if batch.error is not None:  # once more: another thread may have stopped waiting for the same record
            batch.ask(self._index)
        return batch.error

    def __repr__(self) -> str:
        return f"<Delivery of record {self._index} of a batch to {self._batch.queue.topic_partition}>"


class Run(NamedTuple):
    """Records that were put into one batch, in order.

    Attributes:
        first: the place in the batch of the first one.
        records: how many.
    """

    batch: Batch
    first: int
    records: int


class ManyDelivery:
    """The outcomes of the records of one call: a table's rows, or a list."""

    __slots__ = ("_runs",)

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs

    def done(self) -> bool:
        """Whether all of them were acknowledged or have failed."""
        return all(run.batch.done for run in self._runs)

    def result(self, timeout: float | None = None) -> list[tuple[TopicPartition, int, int]]:
        """Wait for all acks and return (partition, first offset, records) of every run of records that follow each
        other in a partition; the offset is -1 with acks=0.

        Raises:
            RequestTimedOut: not all were acknowledged within `timeout` seconds.
            KafkalogError: why the first of those that failed could not be delivered.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return [(batch.queue.topic_partition, batch.offset_of(first), records) for batch, first, records in self._runs]

    def exception(self, timeout: float | None = None) -> KafkalogError | None:
        """Why some could not be delivered, None if all were. Waits as `result` does."""
        if not self.done():
            _wait(self._runs, timeout)
        for run in self._runs:
            run.batch.ask(run.first, run.records)
        return next((run.batch.error for run in self._runs if run.batch.error is not None), None)


def _wait(runs: Sequence[Run], timeout: float | None) -> None:
    """Wait until all are done. Who waits asks for the outcome, unless the wait ends without it."""
    accumulator = runs[0].batch.queue.accumulator
    assert accumulator is not None
    accumulator.lock.run(_ask_and_wait, accumulator, runs, timeout)


def _ask_and_wait(accumulator: Accumulator, runs: Sequence[Run], timeout: float | None) -> None:
    """Lock held."""
    try:
        for run in runs:
            run.batch.ask(run.first, run.records)
            if run.batch.queue.open is run.batch:
                accumulator.hurry(run.batch.queue)
        accumulator.wait_done((run.batch for run in reversed(runs)), timeout, "a delivery")
    except BaseException:
        for run in runs:
            accumulator.ask_no_more(run.batch, run.first)
        raise
