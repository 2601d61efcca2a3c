"""Delivery exactly once: tasks stage their rows beside the log, and the driver commits the staged rows of a batch.

Staged rows cannot be read before they are committed. Every attempt of a task stages its own parts, so speculative and
late attempts do no harm: Spark hands the driver the message of one attempt of each task, and brokers delete
the parts that no message names. `kafkalog/client/transaction/coordinator.py` makes the commit.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.datasource import WriterCommitMessage

from kafkalog.events import get_logger
from pyspark_kafkalog.columns import batches_by_topic, gathered
from pyspark_kafkalog.connections import Key, cluster_of, key_of
from pyspark_kafkalog.write.fingerprint import UNKNOWN, Checkpoint, CheckpointUnreadable, Fingerprints
from pyspark_kafkalog.write.hadoop import SessionFiles
from pyspark_kafkalog.write.micro_batch import NO_BATCH, MicroBatch
from pyspark_kafkalog.write.options import SinkOptions, TxnVersion

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import TaskContext
    from pyspark.sql import SparkSession

    from kafkalog.client.cluster import TopicInfo
    from kafkalog.client.config import ProducerSettings
    from kafkalog.client.transaction.coordinator import TransactionCoordinator
    from kafkalog.client.transaction.stager import NumberedTransactions, StagedPartition

log = get_logger(__name__)

Messages = Sequence[WriterCommitMessage | None]
"""One for each of Spark's partitions; None for a task that failed, or never ran."""

_coordinators: dict[Key, TransactionCoordinator] = {}
_lock = threading.Lock()  # guards _coordinators; comes before that of the clusters
_warned: set[str] = set()  # queries by id, or by their run's session
_fingerprints = Fingerprints()


@dataclass(frozen=True)
class Transaction:
    """Which batch of which transaction a write is, and in which run.

    Attributes:
        stays: the decision is never forgotten (streams and numbered writes), because the same batch may come
            again after any time. Others are forgotten an hour after they are done.
        run_id: empty if it is not known: then this run cannot be fenced, and fences no other run.
        skip_if_recorded: the write is numbered by its user, as `CommitBatch.skip_if_recorded`.
        query_id: of the query that writes, itself or in `foreachBatch`; empty outside any, and if it is not known.
        session_id: of the query's run, as `MicroBatch.session_id`.
    """

    transactional_id: str
    batch_id: int
    run_id: str
    stays: bool
    skip_if_recorded: bool = False
    query_id: str = ""
    session_id: str = ""


class StagedBatch(NamedTuple):
    """A task's staged parts of one transaction."""

    transaction: Transaction
    parts: tuple[StagedPartition, ...]


@dataclass
class Staged(WriterCommitMessage):
    """A task's report to the driver of its staged parts: of one transaction, or of one for each topic of a numbered
    write. Spark reports query and micro-batch to tasks only, so the messages carry them to the driver.

    Attributes:
        checkpoint: of the query that writes, itself or in `foreachBatch`; None outside any. Its query_id is empty if
            only the checkpoint identifies the query.
        micro_batch: of that query.
    """

    batches: tuple[StagedBatch, ...]
    checkpoint: Checkpoint | None = None
    micro_batch: int = NO_BATCH


def task_context() -> TaskContext:
    """The context of the calling task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "called outside a task"
    return context


def stream_transaction(micro_batch: MicroBatch) -> Transaction:
    """The transaction of a stream; called in one of its tasks."""
    query_id, batch_id = micro_batch.query_id, micro_batch.batch_id
    assert query_id and batch_id != NO_BATCH, "Spark did not report query and micro-batch to the task"
    return Transaction(f"spark-stream-{query_id}", batch_id, micro_batch.run_id, stays=True, query_id=query_id)


def stage_rows(
    batches: Iterator[pa.RecordBatch],
    options: SinkOptions,
    columns: tuple[str, ...],
    transaction: Transaction,
    part: int,
) -> Staged:
    """Stage a task's rows as a part of a batch; returns when the brokers have them all."""
    parts = _stage(batches, options, columns, transaction.transactional_id, transaction.batch_id, part)
    return Staged((StagedBatch(transaction, tuple(parts)),))


def stage_numbered(
    batches: Iterator[pa.RecordBatch],
    options: SinkOptions,
    columns: tuple[str, ...],
    txn: TxnVersion,
    micro_batch: MicroBatch,
    part: int,
) -> Staged:
    """Stage a task's rows of a numbered write: versions are counted for each topic, so each has a transaction."""
    from kafkalog.client.transaction.stager import NumberedTransactions

    transactions: dict[str, Transaction] = {}

    def counted(topics: Sequence[TopicInfo]) -> list[str]:
        names = _coordinator(options).numbered(txn.app_id, topics)
        for topic, name in zip(topics, names, strict=True):
            transactions[topic.name] = Transaction(
                name,
                txn.version,
                micro_batch.run_id,
                stays=True,
                skip_if_recorded=True,
                query_id=micro_batch.query_id,
                session_id=micro_batch.session_id,
            )
        return names

    numbered = NumberedTransactions(txn.app_id, counted)
    parts = _stage(batches, options, columns, numbered, txn.version, part)
    by_topic = groupby(parts, key=lambda each: each.topic)  # which they are sorted by
    return Staged(tuple(StagedBatch(transactions[topic], tuple(found)) for topic, found in by_topic))


def _stage(
    batches: Iterator[pa.RecordBatch],
    options: SinkOptions,
    columns: tuple[str, ...],
    transaction: str | NumberedTransactions,
    batch_id: int,
    part: int,
) -> list[StagedPartition]:
    from kafkalog.client.transaction.stager import PartStager

    settings = _producer_settings(options)
    cluster = cluster_of(options.bootstrap_servers, settings)
    with PartStager(cluster, settings, transaction, batch_id, part) as stager:  # a failure aborts
        for batch in gathered(batches, columns):
            stager.stage(dict(batches_by_topic(batch, columns, options.topic)))
        return stager.finish()


def _producer_settings(options: SinkOptions) -> ProducerSettings:
    from kafkalog.client.config import parse_producer

    return parse_producer(options.client)


def commit(messages: Messages, options: SinkOptions, fingerprint: bytes = UNKNOWN) -> None:
    """Commit, on the driver, a write's staged rows; returns when all of them are in the log.

    Raises:
        CountMoved: tasks of a numbered write had two different counts of one topic; nothing is committed.
    """
    by_transaction: dict[Transaction, list[StagedPartition]] = {}
    for staged in _staged(messages):
        for transaction, parts in staged.batches:
            by_transaction.setdefault(transaction, []).extend(parts)
    _check_counts(by_transaction, numbered=options.txn is not None)
    _coordinator(options).look_up({part.topic for parts in by_transaction.values() for part in parts})
    reported = _reported(messages)
    for transaction, found in sorted(by_transaction.items(), key=lambda item: item[0].transactional_id):
        _commit(transaction, found, options, fingerprint, reported)


def with_query(messages: Messages, txn: TxnVersion | None) -> Messages:
    """The messages of a write. If Spark did not report the query to the tasks, it is taken from the checkpoint.

    Raises:
        QueryNotKnown: the checkpoint cannot be read.
    """
    from kafkalog.errors import QueryNotKnown

    found = (each.checkpoint for each in _staged(messages) if each.batches)
    unnamed = next((each for each in found if each is not None and not each.query_id), None)
    if txn is None or unnamed is None:
        return messages
    try:
        query_id = _fingerprints.query_of(unnamed)
    except CheckpointUnreadable as error:
        reason = f"its checkpoint {unnamed.location} cannot be read: {error}"
        raise QueryNotKnown(app_id=txn.app_id, version=txn.version, reason=reason) from error
    return [_of_query(each, query_id) for each in _staged(messages) if each.batches]


def _of_query(message: Staged, query_id: str) -> Staged:
    assert message.checkpoint is not None, "messages of several writes"
    batches = tuple(StagedBatch(replace(each.transaction, query_id=query_id), each.parts) for each in message.batches)
    return Staged(batches, message.checkpoint._replace(query_id=query_id), message.micro_batch)


def read_checkpoint_by(session: SparkSession, messages: Messages) -> None:
    """Have the checkpoint of a query read as Spark does, by the session in whose process these messages are
    committed."""
    files = SessionFiles(session)
    for message in _staged(messages):
        if message.checkpoint is not None:
            message.checkpoint = message.checkpoint._replace(files=files)


def fingerprint(messages: Messages) -> bytes:
    """The fingerprint of the staged micro-batch by its checkpoint, if tasks reported the checkpoint's location."""
    reported = _reported(messages)
    return UNKNOWN if reported is None else _fingerprints.of(*reported)


def _reported(messages: Messages) -> tuple[Checkpoint, int] | None:
    """The checkpoint, and the number of the micro-batch in it, if tasks that staged rows reported them."""
    for message in _staged(messages):
        if message.checkpoint is not None and any(batch.parts for batch in message.batches):
            return message.checkpoint, message.micro_batch
    return None


def _check_counts(transactions: Iterable[Transaction], numbered: bool) -> None:
    from kafkalog.errors import CountMoved
    from kafkalog.format.numbered import name_of

    topics: set[str] = set()
    for transaction in transactions:
        topic = name_of(transaction.transactional_id).topic if numbered else ""
        if topic in topics:
            assert numbered, "messages of several batches"
            raise CountMoved(transactional_id=transaction.transactional_id, version=transaction.batch_id)
        topics.add(topic)


def _commit(
    transaction: Transaction,
    parts: Iterable[StagedPartition],
    options: SinkOptions,
    fingerprint: bytes,
    reported: tuple[Checkpoint, int] | None,
) -> None:
    from kafkalog.client.transaction.coordinator import CommitBatch, Outcome

    def fingerprint_of(batch_id: int) -> bytes:
        # A version that is not the micro-batch's number names no file of the checkpoint.
        if reported is None or reported[1] != transaction.batch_id:
            return UNKNOWN
        return _fingerprints.of_earlier(reported[0], batch_id)

    outcome = _coordinator(options).commit(
        CommitBatch(
            transactional_id=transaction.transactional_id,
            batch_id=transaction.batch_id,
            run_id=transaction.run_id,
            stays=transaction.stays,
            fingerprint=fingerprint,
            parts=sorted(parts, key=lambda part: part.part),
            skip_if_recorded=transaction.skip_if_recorded,
            query_id=transaction.query_id,
            session_id=transaction.session_id,
            fingerprint_of=fingerprint_of,
        )
    )
    if outcome is Outcome.SKIPPED:
        _warn_skipped(transaction)
    else:
        values = {"transactional_id": transaction.transactional_id, "batch_id": transaction.batch_id}
        log.info("batch_committed", **values, outcome=outcome.name)
    if not transaction.stays and (transaction.query_id or transaction.session_id):
        _warn_unnumbered(transaction)


def _warn_skipped(transaction: Transaction) -> None:
    from kafkalog.format.numbered import name_of

    name = name_of(transaction.transactional_id)
    if transaction.query_id:
        reason = (
            f"query {transaction.query_id}, which this write comes from, wrote this version before; nothing is written "
            "now"
        )
        if not transaction.run_id and not transaction.session_id:
            reason += (
                ". Spark does not report the query's run to this write, so a second one of this micro-batch cannot be "
                "distinguished from a restart: two writes to one topic need a txnAppId each"
            )
    else:
        reason = (
            "a write outside any query wrote this version or a later one before; nothing is written now. If these are "
            "other rows, write them under another txnAppId, or restart the count with `kafkalog transactions forget "
            f"{shlex.join([name.app_id, name.topic])}`. If this is foreachBatch, give the write the query's own "
            "checkpointLocation as an option: without it two queries of one txnAppId are not distinguished"
        )
    log.warning("write_skipped", app_id=name.app_id, version=transaction.batch_id, topic=name.topic, reason=reason)


def _warn_unnumbered(transaction: Transaction) -> None:
    """Warn, once for each query, that its batch may run again after a failure, and this write with it."""
    if (query := transaction.query_id or transaction.session_id) not in _warned:
        _warned.add(query)
        reason = (
            "this write in foreachBatch is written again when its micro-batch runs again, as after a restart: give it "
            "the options txnAppId (a name for it) and txnVersion (the batch id), and it is written once"
        )
        if not transaction.query_id:
            reason += "; checkpointLocation (the query's own) too, for Spark does not report the query to this write"
        log.warning("write_not_numbered", query_id=transaction.query_id or "not known", reason=reason)


def abort(messages: Messages, options: SinkOptions) -> None:
    """Report to the brokers that the staged rows of a failed write are not needed. A hint: rows that a commit may have
    decided stay."""
    if parts := [part for staged in _staged(messages) for batch in staged.batches for part in batch.parts]:
        _coordinator(options).abort_parts(parts)


def _staged(messages: Messages) -> list[Staged]:
    """The messages of tasks that succeeded."""
    return [message for message in messages if isinstance(message, Staged)]


def _coordinator(options: SinkOptions) -> TransactionCoordinator:
    """This process's coordinator for the options. It caches the streams' decisions, which saves a request for each
    batch."""
    from kafkalog.client.transaction.coordinator import TransactionCoordinator

    key = key_of(options.bootstrap_servers, options.client)
    with _lock:
        coordinator = _coordinators.get(key)
        if coordinator is None:
            settings = _producer_settings(options)
            coordinator = _coordinators[key] = TransactionCoordinator(
                cluster_of(options.bootstrap_servers, settings), settings
            )
    return coordinator
