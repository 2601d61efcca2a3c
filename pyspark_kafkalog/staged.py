"""Delivery exactly once: tasks stage their rows beside the log, the driver commits what the tasks of a batch staged.

Nothing staged can be read before it is committed. Every attempt of a task stages parts of its own, so twins and late
attempts do no harm: Spark hands the driver the message of one attempt of each task, and what no message names is thrown
away by the brokers. What a commit is made of is `kafkalog/client/transactions.py`'s to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

from kafkalog.log import get_logger
from pyspark_kafkalog.columns import batches_by_topic
from pyspark_kafkalog.connections import Key, cluster_of, key_of
from pyspark_kafkalog.fingerprint import UNKNOWN
from pyspark_kafkalog.sink_options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import TaskContext

    from kafkalog.client.staging import StagedPartition
    from kafkalog.client.transactions import Committer

log = get_logger(__name__)

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
RUN_ID = "spark.jobGroup.id"
"""Task properties: a query's id, the number of its micro-batch, and the id of its run, which a restart changes. Spark
tells the driver's side of a sink neither of the ids, so the tasks' messages carry them there."""


_committers: dict[Key, Committer] = {}


@dataclass(frozen=True)
class Transaction:
    """Which batch of which transaction a write is, and in which run.

    Attributes:
        stays: its decision is kept for ever, for the same batch may come again after any time: a stream's, and that of
            a user's version. Others are forgotten a day after they are done.
        skip_if_recorded: a batch number up to the last recorded one is no mistake, but a write to be skipped.
    """

    transactional_id: str
    batch_id: int
    run_id: str
    stays: bool
    skip_if_recorded: bool = False


@dataclass
class Staged(WriterCommitMessage):
    """What a task staged, as it tells the driver."""

    transaction: Transaction
    parts: tuple[StagedPartition, ...]


def task_context() -> TaskContext:
    """Of the task that this is called in."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "called outside a task"
    return context


def stream_transaction(task: TaskContext) -> Transaction:
    """A stream's, in one of its tasks."""
    query_id, batch_id, run_id = (task.getLocalProperty(name) for name in (QUERY_ID, BATCH_ID, RUN_ID))
    assert query_id and batch_id and run_id, "Spark did not tell the task its query, batch and run"
    return Transaction(f"spark-stream-{query_id}", int(batch_id), run_id, stays=True)


def stage_rows(
    batches: Iterator[pa.RecordBatch],
    options: SinkOptions,
    columns: tuple[str, ...],
    transaction: Transaction,
    part: int,
) -> Staged:
    """Stage a task's rows as a part of a batch; returns when the brokers have them all."""
    from kafkalog.client.config import parse_producer
    from kafkalog.client.staging import PartStager
    from kafkalog.format.batch import producer_id_of

    settings = parse_producer(options.client)
    cluster = cluster_of(options.bootstrap_servers, settings)
    producer_id = producer_id_of(transaction.transactional_id)
    with PartStager(cluster, settings, producer_id, transaction.batch_id, part) as stager:  # a failure discards
        for batch in batches:
            for topic, records in batches_by_topic(batch, columns, options.topic):
                stager.stage(topic, records)
        return Staged(transaction, tuple(stager.finish()))


def commit(messages: Sequence[WriterCommitMessage | None], options: SinkOptions, fingerprint: bytes = UNKNOWN) -> None:
    """Commit, on the driver, what the tasks of a batch staged; returns when all of it is in the log."""
    staged = _staged(messages)
    if not staged:
        return
    from kafkalog.client.transactions import CommitBatch

    transaction = staged[0].transaction
    assert all(each.transaction == transaction for each in staged), "messages of several batches"
    outcome = _committer(options).commit(
        CommitBatch(
            transactional_id=transaction.transactional_id,
            batch_id=transaction.batch_id,
            run_id=transaction.run_id,
            is_stream=transaction.stays,
            fingerprint=fingerprint,
            parts=sorted((part for each in staged for part in each.parts), key=lambda part: part.part),
            skip_if_recorded=transaction.skip_if_recorded,
        )
    )
    log.info(
        "batch_committed",
        transactional_id=transaction.transactional_id,
        batch_id=transaction.batch_id,
        outcome=outcome.name,
    )


def discard(messages: Sequence[WriterCommitMessage | None], options: SinkOptions) -> None:
    """Tell the brokers that what the tasks staged is not wanted. A hint: what a commit may have decided stays."""
    if parts := [part for each in _staged(messages) for part in each.parts]:
        _committer(options).discard(parts)


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    """The messages of tasks that ended well."""
    return [message for message in messages if isinstance(message, Staged)]


def _committer(options: SinkOptions) -> Committer:
    """This process's for the options. It remembers the streams' decisions, which spares a question for each batch."""
    from kafkalog.client.config import parse_producer
    from kafkalog.client.transactions import Committer

    key = key_of(options.bootstrap_servers, options.client)
    committer = _committers.get(key)
    if committer is None:
        settings = parse_producer(options.client)
        committer = _committers[key] = Committer(cluster_of(options.bootstrap_servers, settings), settings)
    return committer
