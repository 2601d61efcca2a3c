"""Writing: a batch's and a stream's writers, as Spark calls them: `write` in the tasks, `commit` and `abort` on the
driver. The option delivery chooses `write/exactly_once.py` or `write/at_least_once.py`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from kafkalog.errors import InvalidArgument, QueryNotKnown
from pyspark_kafkalog.columns import sink_columns
from pyspark_kafkalog.sentences import in_sentences
from pyspark_kafkalog.write import exactly_once
from pyspark_kafkalog.write.at_least_once import write_rows
from pyspark_kafkalog.write.exactly_once import Messages, Transaction
from pyspark_kafkalog.write.fingerprint import checkpoint_of
from pyspark_kafkalog.write.micro_batch import micro_batch_of
from pyspark_kafkalog.write.options import parse_sink
from pyspark_kafkalog.write.target import check_target

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_NOT_REPORTED = (
    "Spark reports it neither to foreachBatch under Spark Connect nor to a Python thread started there (unless it is a "
    "pyspark.InheritableThread)"
)


def _check_all_have_written(messages: Messages) -> None:
    """Spark commits the epochs of a continuous trigger without having called `write`: rows would be lost. It logs this
    error, commits no further epoch and lets the query go on."""
    if None in messages:
        raise InvalidArgument(
            reason="Spark commits tasks that have written nothing: kafkalog's sink is for micro-batches, not for "
            "trigger(continuous=...). Start without that and with a new checkpoint: this one has offsets of rows that "
            "were never written"
        )


@in_sentences
class BatchWriter(DataSourceArrowWriter):
    """One batch write, as Spark's `KafkaBatchWrite`. Pickled into every task, and into the process that commits."""

    def __init__(self, schema: StructType, options: Mapping[str, str], overwrite: bool) -> None:
        if overwrite:
            raise InvalidArgument(reason="rows can only be added to a topic: write with mode('append')")
        self._options = parse_sink(options)
        self._columns = sink_columns(schema, self._options.topic)
        check_target(self._options)
        self._write_id = str(uuid.uuid4())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override] # as pyspark's
        if not self._options.exactly_once:
            return write_rows(iterator, self._options, self._columns)
        task = exactly_once.task_context()
        micro_batch, part, txn = micro_batch_of(task), task.partitionId(), self._options.txn
        if txn is not None:
            checkpoint = checkpoint_of(task, micro_batch, self._options.checkpoint)
            if micro_batch.is_of_unknown_query and not checkpoint.location:
                raise QueryNotKnown(app_id=txn.app_id, version=txn.version, reason=_NOT_REPORTED)
            message = exactly_once.stage_numbered(iterator, self._options, self._columns, txn, micro_batch, part)
            if checkpoint.location:  # in foreachBatch it is seldom known
                message.checkpoint = checkpoint
                message.micro_batch = micro_batch.batch_id if micro_batch.query_id else txn.version
            return message
        transaction = Transaction(
            f"spark-batch-{self._write_id}",
            0,
            self._write_id,
            stays=False,
            query_id=micro_batch.query_id,
            session_id=micro_batch.session_id,
        )
        return exactly_once.stage_rows(iterator, self._options, self._columns, transaction, part)

    def commit(self, messages: Messages) -> None:
        _check_all_have_written(messages)
        messages = exactly_once.with_query(messages, self._options.txn)
        exactly_once.commit(messages, self._options, exactly_once.fingerprint(messages))

    def abort(self, messages: Messages) -> None:
        exactly_once.abort(messages, self._options)


@in_sentences
class StreamWriter(DataSourceStreamArrowWriter):
    """One stream's write, as Spark's `KafkaStreamingWrite`. In complete mode each micro-batch is written whole.

    Spark makes one for each micro-batch's tasks, and another on the driver to commit them; `write_stream` makes one for
    a query.
    """

    def __init__(self, schema: StructType, options: Mapping[str, str]) -> None:
        self._options = parse_sink(options, stream=True)
        self._columns = sink_columns(schema, self._options.topic)
        check_target(self._options)

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of the rows that are written."""
        return self._columns

    def check(self) -> None:
        """Check again, before a micro-batch, that the topic exists."""
        check_target(self._options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override] # as pyspark's
        if not self._options.exactly_once:
            return write_rows(iterator, self._options, self._columns)
        task = exactly_once.task_context()
        micro_batch = micro_batch_of(task)
        transaction = exactly_once.stream_transaction(micro_batch)
        message = exactly_once.stage_rows(iterator, self._options, self._columns, transaction, task.partitionId())
        message.checkpoint = checkpoint_of(task, micro_batch, self._options.checkpoint)
        message.micro_batch = transaction.batch_id
        return message

    def commit(self, messages: Messages, batchId: int) -> None:
        _check_all_have_written(messages)
        exactly_once.commit(messages, self._options, exactly_once.fingerprint(messages))

    def abort(self, messages: Messages, batchId: int) -> None:
        exactly_once.abort(messages, self._options)
