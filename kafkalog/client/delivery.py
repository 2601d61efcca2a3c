"""Handles of what was sent: light ones, over the batch that the record went in."""

from __future__ import annotations

from collections.abc import Sequence

from kafkalog.client.batcher import Batch
from kafkalog.client.outbox import Outbox
from kafkalog.errors import KafkalogError
from kafkalog.records import RecordMetadata, TopicPartition


class Delivery(tuple[Batch, int, Outbox]):
    """What becomes of one record. A tuple, for that is the cheapest object to make (0.1 us; a Future takes 1 to 3)."""

    __slots__ = ()

    def done(self) -> bool:
        """Whether it was acknowledged or has failed."""
        return self[0].done

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Where the record stands, once it is acknowledged; its batch lingers no longer.

        Raises:
            RequestTimedOut: it was not within `timeout` seconds.
            KafkalogError: why it could not be delivered.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self[0].metadata(self[1])

    def exception(self, timeout: float | None = None) -> KafkalogError | None:
        """Why it could not be delivered, None if it was. Waits as `result` does."""
        batch, _, outbox = self
        _wait([batch], outbox, timeout)
        return batch.error

    def __repr__(self) -> str:
        return f"<Delivery of record {self[1]} of a batch to {self[0].queue.topic_partition}>"


class TableDelivery:
    """What becomes of a table's rows."""

    __slots__ = ("_batches", "_outbox")

    def __init__(self, batches: Sequence[Batch], outbox: Outbox) -> None:
        self._batches = batches
        self._outbox = outbox

    def done(self) -> bool:
        """Whether all of them were acknowledged or have failed."""
        return all(batch.done for batch in self._batches)

    def result(self, timeout: float | None = None) -> list[tuple[TopicPartition, int, int]]:
        """Once all are acknowledged, for every batch: (partition, first offset, rows); the offset is -1 with acks=0.

        Raises:
            RequestTimedOut: they were not within `timeout` seconds.
            KafkalogError: why the first of those that failed could not be delivered.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return [(batch.queue.topic_partition, batch.base_offset, batch.count) for batch in self._batches]

    def exception(self, timeout: float | None = None) -> KafkalogError | None:
        """Why some could not be delivered, None if all were. Waits as `result` does."""
        _wait(self._batches, self._outbox, timeout)
        return next((batch.error for batch in self._batches if batch.error is not None), None)


def _wait(batches: Sequence[Batch], outbox: Outbox, timeout: float | None) -> None:
    for batch in batches:
        batch.observed = True
    if all(batch.done for batch in batches):
        return
    with outbox.lock:
        for batch in batches:
            if batch.queue.open is batch:
                outbox.hurry(batch.queue)
        outbox.wait_done(reversed(batches), timeout, "a delivery")
