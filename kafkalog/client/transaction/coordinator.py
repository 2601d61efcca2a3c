"""The driver's side of the exactly-once write: appends all rows that the tasks have staged to the log, exactly once.

A commit reads the decision, makes the leaders prepare, decides by a compare-and-set on the version that was read, makes
the leaders apply, and writes that the batch is done. Once it has decided, nothing depends on this process, because the
leaders follow the znode. The rules are those of `tests/model/transactions.py`, which shows that each is needed.
"""

from __future__ import annotations

import enum
import math
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from kafkalog.client.cluster import Cluster, TopicInfo
from kafkalog.client.config import ProducerSettings, parse_producer
from kafkalog.client.transaction.leaders import Leaders, OutOfPatience, Patience, Place
from kafkalog.client.transaction.stager import StagedPartition, abort_parts
from kafkalog.errors import (
    CheckpointCopied,
    CommitTimedOut,
    CountMoved,
    DecisionMoved,
    InvalidArgument,
    KafkalogError,
    RunFenced,
    StagedPartLost,
    UnknownTopicId,
    VersionOfAnother,
    VersionWrittenTwice,
)
from kafkalog.format import numbered
from kafkalog.format.decisions import (
    BATCH_WRITE_KEPT_SECONDS,
    NO_BATCH,
    NO_VERSION,
    DecidedTopic,
    Decision,
    Writer,
    ranges,
)
from kafkalog.format.producer_ids import producer_id_of
from kafkalog.wire import transactions_pb2 as pb
from kafkalog.wire.decisions import decision_from_wire, decision_to_wire

RUNS_KEPT = 20
"""How many earlier runs of its query a decision names at most."""
_ASKED_FOR_SECONDS = BATCH_WRITE_KEPT_SECONDS / 2
"""A decision may be requested only this long after its prepare began. Later the request could succeed twice, because
the version that it names may exist a second time: the first decision was done and forgotten; or the sets were given up
by raising the version of an empty decision, and that was forgotten. A stream that has decided before has a version that
stays."""
_FENCE_SECONDS = 5.0
"""How long a commit that is given up tries to find out whether it is decided, and to prevent that it will be."""

_OUTCOME_SENTENCES = {
    "yes": "it is decided: its rows are or will be in the topic, do not write them again; "
    "`kafkalog transactions describe {id}` shows how far it is",
    "no": "it is not decided and will not be: none of its rows will appear, so they may be written again",
    "unknown": "whether it is decided is not known: do not write its rows again before "
    "`kafkalog transactions describe {id}` says that batch {batch} is not decided",
}


class Outcome(enum.Enum):
    """The outcome of a commit.

    COMMITTED: the given parts are in the log. RECORDED: the parts of an earlier attempt at the same batch are in
    the log, and the given ones are dropped. SKIPPED: a numbered write whose batch was written before; for a plain job,
    that batch or a later one.
    """

    COMMITTED = "committed"
    RECORDED = "recorded"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class CommitBatch:
    """A batch of a transaction, staged.

    Attributes:
        run_id: of the query's run; empty if there is none, or it is not known. A run that another run replaced is
            refused.
        stays: the decision is never forgotten (streams and numbered writes).
        fingerprint: of the batch's input; empty if it is not known.
        skip_if_recorded: the write is numbered by its user. A write with the recorded batch id is skipped once for each
            run of the query that recorded it (every time, if the run is not known). A plain job, which is outside any
            query, also skips lower batch ids. All other writes up to the recorded id fail (`next_step`).
        query_id: of the query that writes; empty outside any.
        session_id: another name of the run; empty if there is none. It may be known where run_id is not.
        fingerprint_of: of the input of an earlier batch by the same checkpoint; empty if it is not known. May read
            files.
    """

    transactional_id: str
    batch_id: int
    run_id: str
    stays: bool
    fingerprint: bytes
    parts: Sequence[StagedPartition]
    skip_if_recorded: bool = False
    query_id: str = ""
    session_id: str = ""
    fingerprint_of: Callable[[int], bytes] = field(default=lambda batch_id: b"", compare=False, repr=False)


class Step(enum.Enum):
    """The next step of a commit."""

    ROLL_FORWARD = "roll the recorded batch forward"
    PREPARE = "prepare and decide"
    COMMITTED = "nothing, it is committed"
    RECORDED = "nothing, an earlier attempt is committed"
    CLAIM = "have it recorded as the write that this run has of the batch"
    SKIP = "nothing, it was written before"


def next_step(decision: Decision, batch: CommitBatch, commit_uuid: bytes) -> Step:
    """The next step for a batch by the current decision.

    A run of a query has one write of a numbered batch, because Spark runs no batch twice in a run: the write that was
    recorded, or the first one that was skipped. The decision names these writes, so that any process may commit.

    Raises:
        RunFenced: another run has replaced the batch's run.
        CheckpointCopied: the decision is about another input, or later, than the batch's checkpoint knows.
        VersionOfAnother: another query, or none, has recorded the batch's number.
        VersionWrittenTwice: the batch's run has another write of that number.
        CountMoved: the transaction was forgotten meanwhile.
    """
    if decision.forgotten:
        raise CountMoved(transactional_id=batch.transactional_id, version=batch.batch_id)
    if batch.run_id and batch.run_id in decision.replaced_runs:
        raise RunFenced(run_id=batch.run_id, transactional_id=batch.transactional_id, other=decision.run_id)
    if decision.is_open:
        return Step.ROLL_FORWARD
    if decision.batch_id < batch.batch_id:
        if _is_of_another_past(decision, batch):
            raise CheckpointCopied(
                batch_id=batch.batch_id,
                transactional_id=batch.transactional_id,
                reason=f"{_run(decision)} wrote batch {decision.batch_id} from another input than this checkpoint has "
                "for it, so rows of this batch may be in the topic already",
            )
        return Step.PREPARE
    if decision.batch_id == batch.batch_id and decision.commit_uuid == commit_uuid:
        return Step.COMMITTED
    if batch.skip_if_recorded:
        if batch.query_id != decision.query_id:
            raise _of_another(decision, batch)
        if not batch.query_id:
            return Step.SKIP  # a plain job may number its writes in any order
    if decision.batch_id > batch.batch_id:  # a query runs only its last batch again
        raise CheckpointCopied(
            batch_id=batch.batch_id,
            transactional_id=batch.transactional_id,
            reason=f"batch {decision.batch_id} is in the topic already, written by {_run(decision)}. "
            "Skipping the write could lose its rows",
        )
    if _is_of_another_input(decision, batch):
        raise CheckpointCopied(
            batch_id=batch.batch_id,
            transactional_id=batch.transactional_id,
            reason=f"{_run(decision)} wrote a batch of this number from another input",
        )
    if not batch.skip_if_recorded:
        return Step.RECORDED
    writer = _writer(batch, commit_uuid)
    if writer in decision.writers:
        return Step.SKIP
    if _has_another_write(decision, batch, commit_uuid):
        raise _written_twice(batch)
    return Step.CLAIM if writer.run_id or writer.session_id else Step.SKIP


def _writer(batch: CommitBatch, commit_uuid: bytes) -> Writer:
    return Writer(commit_uuid, batch.run_id, batch.session_id)


def _run(decision: Decision) -> str:
    return f"run {decision.run_id}" if decision.run_id else "a run that is not known"


def _has_another_write(decision: Decision, batch: CommitBatch, commit_uuid: bytes) -> bool:
    """Whether the run of a numbered batch has recorded a write of that number other than this attempt."""
    writer = _writer(batch, commit_uuid)
    return any(other.commit_uuid != commit_uuid and writer.is_in_run_of(other) for other in decision.writers)


def _is_of_another_input(decision: Decision, batch: CommitBatch) -> bool:
    return bool(batch.fingerprint and decision.fingerprint and batch.fingerprint != decision.fingerprint)


def _is_of_another_past(decision: Decision, batch: CommitBatch) -> bool:
    """Whether the last decided batch, an earlier one of the same query, had another input by the batch's checkpoint:
    one of two copies of a checkpoint has gone on, and batches without rows, which leave no decision, have hidden it.
    The decisions of a batch's own run are not looked at."""
    writers = decision.writers or (Writer(decision.commit_uuid, decision.run_id),)  # of a stream: it names its run
    if (
        any(map(_writer(batch, b"").is_in_run_of, writers))
        or not decision.fingerprint
        or not batch.query_id
        or batch.query_id != decision.query_id
    ):
        return False
    found = batch.fingerprint_of(decision.batch_id)
    return bool(found) and found != decision.fingerprint


def is_recorded(decision: Decision, batch: CommitBatch, commit_uuid: bytes) -> bool | None:
    """Whether the decided batch is this one, written by any attempt. None (unknown): a later batch was decided, or one
    of this number that may have other rows."""
    if decision.batch_id < batch.batch_id:
        return False
    if decision.batch_id > batch.batch_id:
        return None
    if decision.commit_uuid == commit_uuid:
        return True
    is_anothers = batch.skip_if_recorded and batch.query_id != decision.query_id
    if is_anothers or _has_another_write(decision, batch, commit_uuid) or _is_of_another_input(decision, batch):
        return None
    return True


def _written_twice(batch: CommitBatch) -> VersionWrittenTwice:
    name = numbered.name_of(batch.transactional_id)
    run = batch.run_id or f"of session {batch.session_id}"
    return VersionWrittenTwice(version=batch.batch_id, app_id=name.app_id, topic=name.topic, run=run)


def _of_another(decision: Decision, batch: CommitBatch) -> VersionOfAnother:
    name = numbered.name_of(batch.transactional_id)
    return VersionOfAnother(
        version=batch.batch_id,
        app_id=name.app_id,
        topic=name.topic,
        recorded=decision.batch_id,
        recorded_by=f"query {decision.query_id}" if decision.query_id else "a write outside any query",
        writer=f"query {batch.query_id}"
        if batch.query_id
        else "no known query. In foreachBatch, set the option checkpointLocation to the query's own checkpoint",
        command=shlex.join([name.app_id, name.topic]),
    )


def decided(decision: Decision, batch: CommitBatch, commit_uuid: bytes) -> Decision:
    """The decision for a batch, to replace the given one. A batch whose run is not known fences no run."""
    run_id = batch.run_id or decision.run_id
    replaced = [run for run in decision.replaced_runs if run != run_id]
    if decision.run_id and decision.run_id != run_id:
        replaced.append(decision.run_id)
    by_topic: dict[tuple[bytes, str], list[int]] = {}
    for part in batch.parts:
        by_topic.setdefault((part.topic_id, part.topic), []).append(part.partition)
    return Decision(
        transactional_id=batch.transactional_id,
        version=decision.version,
        batch_id=batch.batch_id,
        commit_uuid=commit_uuid,
        run_id=run_id,
        query_id=batch.query_id,
        fingerprint=batch.fingerprint,
        topics=tuple(DecidedTopic(*topic, ranges(numbers)) for topic, numbers in sorted(by_topic.items())),
        replaced_runs=tuple(replaced[-RUNS_KEPT:]),
        stays=batch.stays,
        writers=(_writer(batch, commit_uuid),) if batch.skip_if_recorded and batch.query_id else (),
        unknown=decision.unknown,
    )


def claimed(decision: Decision, batch: CommitBatch, commit_uuid: bytes) -> Decision:
    """The decision after a write of another run was skipped, because its batch is recorded. It fences no run."""
    return replace(decision, writers=(*decision.writers, _writer(batch, commit_uuid))[-RUNS_KEPT:])


def places_of(decision: Decision) -> list[Place]:
    """The partitions that a decision is about."""
    return [Place(topic.topic, topic.topic_id, number) for topic in decision.topics for number in topic.numbers()]


@dataclass
class _Attempt:
    """A commit under way.

    Attributes:
        decided: whether its batch is recorded, as last seen (`is_recorded`).
        over: the decision that the last request to ZooKeeper would replace.
        until: end of the time in which that write may be requested, by `_seconds_awake_or_not`.
    """

    batch: CommitBatch
    commit_uuid: bytes
    decided: bool | None = False
    over: Decision | None = None
    until: float = math.inf


class TransactionCoordinator:
    """Commits batches of staged parts: a two-phase commit whose decision is a znode (Kafka's transaction coordinator of
    KIP-98 is a broker). Thread-safe, for different transactions; `close` it after use.

    Args:
        cluster: closed by its owner.
        settings: a producer's, of which transaction.commit.timeout.ms is used: a commit fails after this long without
            progress in any partition, however large it is.
    """

    def __init__(self, cluster: Cluster, settings: ProducerSettings | None = None) -> None:
        self._cluster = cluster
        self._timeout = (settings or parse_producer({})).transaction_commit_timeout_ms / 1000
        self._leaders = Leaders(cluster)
        self._lock = threading.Lock()  # guards what follows
        self._known: dict[str, Decision] = {}  # of streams, as last seen; a stale one costs one refused write

    def close(self) -> None:
        self._leaders.close()

    # --- commits

    def look_up(self, topics: Iterable[str]) -> None:
        """Fetch in one request the topics that several commits will need. A hint: a commit fetches what is missing."""
        with suppress(KafkalogError):
            self._cluster.look_up(topics, patient=False)

    def commit(self, batch: CommitBatch) -> Outcome:
        """Append a batch to the log, whole and once; returns when every partition has it.

        Raises:
            RunFenced, CheckpointCopied, VersionOfAnother, VersionWrittenTwice, CountMoved: the batch may not be
                written.
            StagedPartLost: a leader does not have what was staged.
            UnknownTopicId: a topic was deleted before the batch was decided.
            CommitTimedOut: there was no progress for transaction.commit.timeout.ms. The error states whether the batch
                is decided. In any case a stream and a numbered write commit the same batch again after a restart.
        """
        with self._lock:
            known = self._known.get(batch.transactional_id)
        if not batch.parts:  # nothing to decide; the known decision may still refuse the batch
            if known is not None:
                next_step(known, batch, b"")
            return Outcome.COMMITTED
        attempt = _Attempt(batch, uuid.uuid4().bytes)
        try:
            return self._commit(attempt, known)
        except OutOfPatience as over:
            is_decided = self._is_decided(attempt)
            outcome = {True: "yes", False: "no", None: "unknown"}[is_decided]
            sentence = _OUTCOME_SENTENCES[outcome].format(id=shlex.quote(batch.transactional_id), batch=batch.batch_id)
            raise CommitTimedOut(
                transactional_id=batch.transactional_id,
                batch_id=batch.batch_id,
                timeout_ms=round(self._timeout * 1000),
                reason=str(over.error),
                decided=outcome,
                outcome=sentence,
            ) from over.error

    def _commit(self, attempt: _Attempt, known: Decision | None) -> Outcome:
        batch, commit_uuid = attempt.batch, attempt.commit_uuid
        patience = self._patience()
        if known is None or known.is_open or known.run_id != batch.run_id or known.batch_id >= batch.batch_id:
            known = self._read(batch.transactional_id, patience)
        decision = known
        while True:
            attempt.decided = is_recorded(decision, batch, commit_uuid)
            step = next_step(decision, batch, commit_uuid)
            if step is Step.ROLL_FORWARD:
                decision = self._roll_forward(decision, patience)
                self._remember(decision)
            elif step is Step.PREPARE:
                until = _asked_until(stays=batch.stays and decision.batch_id != NO_BATCH)
                self._prepare(decision, batch, commit_uuid, patience)
                if _seconds_awake_or_not() > until:
                    decision = self._read(batch.transactional_id, patience)
                    continue  # the prepared sets may have been given up: prepare again
                attempt.over, attempt.until = decision, until
                decision = self._write(decided(decision, batch, commit_uuid), patience, until)
                if decision.commit_uuid == commit_uuid:
                    patience.progressed()
            elif step is Step.CLAIM:
                decision = self._write(claimed(decision, batch, commit_uuid), patience)
            else:
                if step is not Step.COMMITTED:
                    self.abort_parts(batch.parts)
                return _OUTCOMES[step]

    def _is_decided(self, attempt: _Attempt) -> bool | None:
        """Whether the batch of a commit that is given up is decided; None if that is not known.

        If the commit requested its decision and got no answer, the version is raised: a late request is then refused,
        because it names another version. For a stream's or a numbered batch another attempt may be decided meanwhile.

        The decision is read only if raising the version was refused: a broker's read may be stale, and a
        compare-and-set never is.
        """
        batch, over = attempt.batch, attempt.over
        if attempt.decided is not False or (over is None and not batch.stays):
            return attempt.decided
        if _seconds_awake_or_not() > attempt.until:
            return None
        patience = Patience(min(_FENCE_SECONDS, self._timeout))
        try:
            if over is None:
                return is_recorded(self._read(batch.transactional_id, patience), batch, attempt.commit_uuid)
        except (OutOfPatience, KafkalogError):
            return False  # as last seen, and its decision was never requested
        try:
            now = self._write(over, patience)  # changes only the version
        except (OutOfPatience, KafkalogError):
            return None
        if now.forgotten or now.version == NO_VERSION:
            return None  # it may have been decided before the version that was read
        return is_recorded(now, batch, attempt.commit_uuid)

    def _prepare(self, decision: Decision, batch: CommitBatch, commit_uuid: bytes, patience: Patience) -> None:
        by_place: dict[Place, list[StagedPartition]] = {}
        for part in sorted(batch.parts, key=lambda part: part.part):
            by_place.setdefault(Place(part.topic, part.topic_id, part.partition), []).append(part)

        def request(places: Sequence[Place]) -> pb.PrepareRequest:
            message = pb.PrepareRequest(
                transactional_id=batch.transactional_id,
                producer_id=producer_id_of(batch.transactional_id),
                batch_id=batch.batch_id,
                commit_uuid=commit_uuid,
                version=decision.version,
            )
            for place in places:
                wanted = message.partitions.add(topic_id=place.topic_id, partition=place.partition)
                for part in by_place[place]:
                    wanted.parts.add(uuid=part.uuid, part=part.part, batches=part.batches, length=part.length)
            return message

        self._leaders.ask(
            "Prepare", by_place, request, patience, lambda place, error: False, lambda place: len(by_place[place])
        )

    def _roll_forward(
        self, decision: Decision, patience: Patience, lost: Callable[[Place, StagedPartLost], bool] | None = None
    ) -> Decision:
        """Apply a decided batch in all its partitions and mark it done; returns the decision after that. A partition of
        a deleted topic counts as applied, and so does one whose leader has reported the batch; `lost` returns whether
        one whose staged parts are lost counts too."""

        def request(places: Sequence[Place]) -> pb.ApplyRequest:
            return pb.ApplyRequest(
                transactional_id=decision.transactional_id,
                producer_id=producer_id_of(decision.transactional_id),
                batch_id=decision.batch_id,
                commit_uuid=decision.commit_uuid,
                partitions=_partitions(places),
            )

        def settle(place: Place, error: KafkalogError) -> bool:
            if isinstance(error, StagedPartLost):
                now = self._now(decision, patience)
                if now.done or now.commit_uuid != decision.commit_uuid:  # only a done decision is ever replaced
                    return True  # applied everywhere, long ago: leaders have forgotten their parts of it
                if now.has_applied(place.topic_id, place.partition):
                    return True  # its leader now may not know so: it may have begun anew
                return lost is not None and lost(place, error)
            return isinstance(error, UnknownTopicId)

        places = places_of(decision)
        waiting = [each for each in places if not decision.has_applied(each.topic_id, each.partition)]
        self._leaders.ask("Apply", waiting, request, patience, settle)
        done = self._write_done(decision, patience)
        self._leaders.hint(
            "ForgetStaged",
            places,
            lambda told: pb.ForgetStagedRequest(
                transactional_id=decision.transactional_id,
                batch_id=decision.batch_id,
                partitions=_partitions(told),
                stays=decision.stays,
            ),
        )
        return done

    def _now(self, decision: Decision, patience: Patience) -> Decision:
        """The current state of an open decision. If a batch write has none any more, it was done: open decisions are
        never forgotten. A read that finds none may be stale; then the decision is written over its own version. It is
        not written over a version that a leader raised since, which may be the same."""
        if decision.stays:
            return self._read(decision.transactional_id, patience, decision.version)
        found = self._read(decision.transactional_id, patience)
        if found.batch_id == NO_BATCH and found.version >= decision.version:
            return _unless_forgotten(found, decision)
        return _unless_forgotten(self._write(decision, patience, _asked_until(stays=False)), decision)

    def _write_done(self, decision: Decision, patience: Patience) -> Decision:
        """Mark a batch done that every partition has. Another process may do it first; the result is the same."""
        now, until = decision, _asked_until(stays=decision.stays)
        while now.commit_uuid == decision.commit_uuid and now.is_open:
            now = _unless_forgotten(self._write(replace(now, done=True, applied=()), patience, until), decision)
        return now

    # --- decisions

    def _decide(self, decision: Decision) -> int:
        request = pb.DecideRequest(decision=decision_to_wire(decision))
        reply: pb.DecideReply = self._cluster.call("Decide", request, patient=False)
        return reply.version

    def _write(self, decision: Decision, patience: Patience, until: float = math.inf) -> Decision:
        """Write a decision over the version that it names; returns the decision that is stored then, this or another
        one.

        While it is unknown whether it was written, the write is repeated: it is refused if an earlier try succeeded. A
        read cannot show that, because it may be stale. Raises OutOfPatience also if the outcome is unknown at `until`.
        """
        while True:
            try:
                return replace(decision, version=self._decide(decision))
            except DecisionMoved as error:
                self._pause(patience, error)
                return self._read(decision.transactional_id, patience, error.facts["version"])
            except KafkalogError as error:
                if not error.retriable:
                    raise
                self._pause(patience, error)
                if _seconds_awake_or_not() > until:
                    raise OutOfPatience(error) from error

    def _patience(self) -> Patience:
        return Patience(self._timeout)

    def _read(self, transactional_id: str, patience: Patience, at_least: int = NO_VERSION) -> Decision:
        """The decision as a broker's ZooKeeper server has it. That server may lag behind, so the decision is read again
        until it has a version that is known to exist."""
        while True:
            [found] = self._read_all([transactional_id], patience)
            if found.version >= at_least:
                self._remember(found)
                return found
            behind = DecisionMoved(transactional_id=transactional_id, expected=found.version, version=at_least)
            self._pause(patience, behind)

    def _read_all(self, transactional_ids: Sequence[str], patience: Patience) -> list[Decision]:
        """Decisions as a broker's ZooKeeper server has them, in the order of the ids."""
        request = pb.ReadDecisionsRequest(transactional_ids=transactional_ids)
        while True:
            try:
                reply: pb.Decisions = self._cluster.call("ReadDecisions", request)
                return [decision_from_wire(each) for each in reply.decisions]
            except KafkalogError as error:
                if not error.retriable:
                    raise
                self._pause(patience, error)

    def _remember(self, decision: Decision) -> None:
        if decision.stays:
            with self._lock:
                self._known[decision.transactional_id] = decision

    def _pause(self, patience: Patience, error: KafkalogError) -> None:
        """Wait before another try. Raises OutOfPatience once the time is over."""
        pause = self._cluster.settings.retry_backoff_ms / 1000
        patience.failed(error, pause)
        self._cluster.pause(pause)

    @contextmanager
    def _patiently(self) -> Iterator[Patience]:
        """For operations other than commits: raises the last error when the time is up."""
        try:
            yield self._patience()
        except OutOfPatience as over:
            raise over.error from None

    # --- by hand, and hints

    def abort_parts(self, parts: Iterable[StagedPartition]) -> None:
        """Report to the leaders that these parts will not be committed. A hint: prepared parts stay; never fails."""
        abort_parts(
            self._cluster,
            [(Place(part.topic, part.topic_id, part.partition).label, part.topic_id, part.uuid) for part in parts],
        )

    def decisions(self) -> list[Decision]:
        """The decisions of all transactions, by id."""
        reply: pb.Decisions = self._cluster.call("ListDecisions", pb.ListDecisionsRequest())
        return [decision_from_wire(each) for each in reply.decisions]

    def decision(self, transactional_id: str) -> Decision:
        """A transaction's last decision; version -1 if there is none."""
        with self._patiently() as patience:
            return self._read(transactional_id, patience)

    def numbered(self, app_id: str, topics: Sequence[TopicInfo]) -> list[str]:
        """The current transactional ids of an application's numbered writes to topics, in the topics' order."""
        names: dict[bytes, str] = {}
        left, generation = list(topics), 0
        while left:
            asked = [numbered.transactional_id(app_id, topic.name, topic.topic_id, generation) for topic in left]
            names.update(zip((topic.topic_id for topic in left), asked, strict=True))
            with self._patiently() as patience:
                decisions = self._read_all(asked, patience)
            left = [topic for topic, decision in zip(left, decisions, strict=True) if decision.forgotten]
            generation += 1
        return [names[topic.topic_id] for topic in topics]

    def recorded(self, app_id: str, topic: str = "") -> list[Decision]:
        """The decisions of an application's numbered writes, to topics of that name or to all."""
        found = []
        for decision in self.decisions():
            name = numbered.parse(decision.transactional_id)
            if name is None or name.app_id != app_id or topic not in ("", name.topic):
                continue
            if decision.batch_id != NO_BATCH:  # a forgotten one has none
                found.append(decision)
        return found

    def forget(self, decisions: Iterable[Decision]) -> None:
        """Restart the counts of numbered writes, under the next name, because leaders keep the apply progress of this
        one. If one of several cannot be forgotten, none is.

        Raises:
            InvalidArgument: a batch is decided and not done.
            DecisionMoved: another process wrote the decision meanwhile; the decisions before it are forgotten.
        """
        decisions = list(decisions)
        for decision in decisions:
            if decision.is_open:
                raise InvalidArgument(
                    reason=f"version {decision.batch_id} of transaction '{decision.transactional_id}' is decided and "
                    "not everywhere yet, so it cannot be forgotten; `kafkalog transactions resolve` finishes it"
                )
        for decision in decisions:
            forgotten = Decision(decision.transactional_id, decision.version, stays=True, forgotten=True)
            self._decide(replace(forgotten, unknown=decision.unknown))
            with self._lock:
                self._known.pop(decision.transactional_id, None)

    def staged(self, transactional_id: str = "") -> list[pb.StagedSet]:
        """What is staged on all brokers, of all transactions or of one: each once, from its partition's leader if that
        has it."""
        request = pb.ListStagedRequest(transactional_id=transactional_id)
        found: dict[tuple[object, ...], pb.StagedSet] = {}
        for broker in self._cluster.describe().brokers:
            for staged in self._cluster.call("ListStaged", request, broker_id=broker.broker_id).sets:
                key = *_identity(staged), staged.producer_id, staged.batch_id
                if key not in found or not staged.is_copy:
                    found[key] = staged
        return list(found.values())

    def abort(self, transactional_id: str) -> tuple[list[pb.StagedSet], list[pb.StagedSet]]:
        """Give up sets that are prepared and not decided. First the version is raised, so that a writer has to prepare
        again before it can decide; then this is reported to the leaders. A leader keeps a set that a writer prepared
        again meanwhile, and one in a partition where an apply runs: in-doubt recovery drops that one later.

        Returns:
            the prepared sets that were given up, and those that leaders have kept; without those that the writer has
            committed meanwhile, or may have.

        Raises:
            InvalidArgument: a batch is decided and not done; it can only be rolled forward (`resolve`).
            DecisionMoved: another process decided meanwhile.
        """
        decision = self.decision(transactional_id)
        if decision.is_open:
            raise InvalidArgument(
                reason=f"batch {decision.batch_id} of transaction '{transactional_id}' is decided, so it cannot be "
                "aborted; `kafkalog transactions resolve` finishes it"
            )
        undecided = [each for each in self.staged(transactional_id) if _is_undecided(each, decision)]
        if not undecided:
            return [], []
        version = self._decide(decision)
        while version <= max(staged.version for staged in undecided):  # one raised before was forgotten
            version = self._decide(replace(decision, version=version))
        self._remember(replace(decision, version=version))
        for staged in undecided:
            place = Place(staged.topic, staged.topic_id, staged.partition)
            request = pb.ForgetStagedRequest(
                transactional_id=transactional_id,
                batch_id=staged.batch_id,
                commit_uuid=staged.commit_uuid,
                below_version=version,
                partitions=_partitions([place]),
            )
            _, leader = self._cluster.leader_of(place.label, place.topic_id)
            self._cluster.call("ForgetStaged", request, broker_id=leader.broker_id)
        left = {_identity(each) for each in self.staged(transactional_id) if not each.is_copy}
        now = self.decision(transactional_id)  # after that: a set may be gone because it was committed
        given_up, kept = [], []
        for each in undecided:
            if each.commit_uuid == now.commit_uuid:
                continue
            if _identity(each) in left:
                kept.append(each)
            elif not decision.batch_id < each.batch_id < now.batch_id:
                given_up.append(each)
        return given_up, kept

    def resolve(self, transactional_id: str, accept_loss: bool = False) -> tuple[Decision, list[StagedPartLost]]:
        """Apply a decided batch in all its partitions and mark it done.

        Args:
            accept_loss: continue without staged parts that are lost.

        Returns:
            the decision after that, and the lost parts.

        Raises:
            StagedPartLost: parts are lost, and `accept_loss` is not set.
        """
        decision = self.decision(transactional_id)
        losses: list[StagedPartLost] = []

        def lost(place: Place, error: StagedPartLost) -> bool:
            losses.append(error)
            return accept_loss

        if decision.is_open:
            with self._patiently() as patience:
                decision = self._roll_forward(decision, patience, lost)
            self._remember(decision)
        return decision, losses


_OUTCOMES = {
    Step.COMMITTED: Outcome.COMMITTED,
    Step.RECORDED: Outcome.RECORDED,
    Step.SKIP: Outcome.SKIPPED,
}


def _asked_until(stays: bool) -> float:
    """The end of the time in which a decision may be requested; `stays`: the one that it replaces is kept for
    ever."""
    return math.inf if stays else _seconds_awake_or_not() + _ASKED_FOR_SECONDS


def _seconds_awake_or_not() -> float:
    """Seconds that also pass while the machine sleeps; wall time if the system has no such clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_REALTIME))


def _is_undecided(staged: pb.StagedSet, decision: Decision) -> bool:
    if staged.is_copy and decision.done and staged.batch_id <= decision.batch_id:
        return False  # a follower has not dropped it yet
    return bool(staged.commit_uuid) and (decision.batch_id == NO_BATCH or staged.commit_uuid != decision.commit_uuid)


def _identity(staged: pb.StagedSet) -> tuple[bytes, int, bytes]:
    return staged.topic_id, staged.partition, staged.commit_uuid


def _unless_forgotten(now: Decision, decision: Decision) -> Decision:
    """The decision that is stored in place of an open one. If a batch write's is gone, it was done, also if a leader
    has raised the version of the empty decision since."""
    if now.batch_id == NO_BATCH and not decision.stays:
        return replace(decision, done=True, applied=())
    return now


def _partitions(places: Iterable[Place]) -> list[pb.TransactionPartition]:
    return [pb.TransactionPartition(topic_id=place.topic_id, partition=place.partition) for place in places]
