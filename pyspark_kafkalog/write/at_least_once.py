"""Delivery at least once: a task writes straight into the log by the client's producer, and returns when everything it
wrote is acknowledged. A task that Spark runs again writes its rows again. Rows of one task keep their order within a
partition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

from kafkalog.errors import KafkalogError
from pyspark_kafkalog.columns import batches_by_topic, gathered
from pyspark_kafkalog.connections import Key, as_patient_at_first, key_of
from pyspark_kafkalog.write.options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.client.producer.delivery import ManyDelivery
    from kafkalog.client.producer.producer import Producer

_producers: dict[Key, Producer] = {}
"""Spark's Python workers live through many tasks and micro-batches, one task at a time."""


def write_rows(
    batches: Iterator[pa.RecordBatch], options: SinkOptions, columns: tuple[str, ...]
) -> WriterCommitMessage:
    """Write a task's rows and wait until all are acknowledged; the first failure fails the task.

    A producer is kept for the process's next task only if this task succeeds: the records that are left after a failure
    must not reach the log later.
    """
    key = key_of(options.bootstrap_servers, options.client)
    producer = _producers.pop(key, None) or new_producer(options)
    try:
        producer.look_up_again()  # a topic may have been created again since the last task
        unacknowledged: deque[ManyDelivery] = deque()
        for batch in gathered(batches, columns):
            for topic, records in batches_by_topic(batch, columns, options.topic):
                unacknowledged.append(producer.send_arrow(topic, records))
            while unacknowledged and unacknowledged[0].done():
                unacknowledged.popleft().result()
        producer.flush()
        for delivery in unacknowledged:
            delivery.result()
    except BaseException:
        with suppress(KafkalogError):  # of the records given up here; the task's own error is raised
            producer.close(timeout=0)
        raise
    _producers[key] = producer
    return WriterCommitMessage()


def new_producer(options: SinkOptions) -> Producer:
    """A producer of this write's settings. Raises as the Producer's constructor."""
    from kafkalog.client.config import parse_producer
    from kafkalog.client.producer.producer import Producer

    settings = as_patient_at_first(options.client, parse_producer(options.client).retry_timeout_ms)
    return Producer(options.bootstrap_servers, **settings)
