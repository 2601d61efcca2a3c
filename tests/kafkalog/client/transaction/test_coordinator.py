"""The exactly-once write end to end: stage, commit, read; and what becomes of a batch whose driver or broker failed."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from broker.local import LocalCluster
from kafkalog.cli.main import run
from kafkalog.client.admin import Admin, AtTimestamp
from kafkalog.client.cluster import Cluster
from kafkalog.client.config import ClientSettings, parse_producer
from kafkalog.client.transaction import coordinator as transactions
from kafkalog.client.transaction.coordinator import (
    CommitBatch,
    Outcome,
    Step,
    TransactionCoordinator,
    _Attempt,
    claimed,
    decided,
    is_recorded,
    next_step,
)
from kafkalog.client.transaction.leaders import Patience, Place
from kafkalog.client.transaction.stager import PartStager, StagedPartition
from kafkalog.errors import (
    BrokerUnreachable,
    CheckpointCopied,
    CommitTimedOut,
    CountMoved,
    DecisionMoved,
    InvalidArgument,
    KafkalogError,
    RequestTimedOut,
    RunFenced,
    StagedPartLost,
    UnknownTopicId,
    VersionOfAnother,
    VersionWrittenTwice,
)
from kafkalog.format.decisions import BATCH_WRITE_KEPT_SECONDS, Decision, Writer
from kafkalog.format.producer_ids import producer_id_of
from kafkalog.records import TopicPartition
from kafkalog.wire import transactions_pb2 as pb
from kafkalog.wire.decisions import decision_from_wire, decision_to_wire
from tests.reading import messages_of
from tests.waiting import waited_for

# --- the rules, pure

BATCH = CommitBatch("tx", 5, "run", True, b"input", ())
NUMBERED = replace(BATCH, skip_if_recorded=True, transactional_id=f"app-my app:out:{'0' * 32}")
UUID = b"u" * 16
OTHER = b"o" * 16
RECORDED = Decision("tx", 9, 5, OTHER, "older", b"input", True, stays=True)


@pytest.mark.parametrize(
    ("decision", "batch", "step"),
    [
        (Decision("tx"), BATCH, Step.PREPARE),
        (Decision("tx", 3), BATCH, Step.PREPARE),
        (replace(RECORDED, batch_id=4), BATCH, Step.PREPARE),
        (replace(RECORDED, batch_id=4, done=False), BATCH, Step.ROLL_FORWARD),
        (replace(RECORDED, done=False), BATCH, Step.ROLL_FORWARD),
        (replace(RECORDED, batch_id=6, done=False), BATCH, Step.ROLL_FORWARD),
        (RECORDED, BATCH, Step.RECORDED),
        (replace(RECORDED, commit_uuid=UUID), BATCH, Step.COMMITTED),
        (replace(RECORDED, fingerprint=b""), BATCH, Step.RECORDED),
        (replace(RECORDED, fingerprint=b"x"), replace(BATCH, fingerprint=b""), Step.RECORDED),
        (RECORDED, replace(BATCH, skip_if_recorded=True), Step.SKIP),
        (replace(RECORDED, batch_id=6), replace(BATCH, skip_if_recorded=True), Step.SKIP),
        (replace(RECORDED, fingerprint=b"x"), replace(BATCH, skip_if_recorded=True), Step.SKIP),
        (replace(RECORDED, replaced_runs=("run",)), replace(BATCH, run_id=""), Step.RECORDED),
        (replace(RECORDED, query_id="q"), replace(NUMBERED, query_id="q"), Step.CLAIM),
        (replace(RECORDED, batch_id=4, query_id="q"), replace(NUMBERED, query_id="r"), Step.PREPARE),
        (replace(RECORDED, batch_id=4, query_id="q"), NUMBERED, Step.PREPARE),
    ],
)
def test_next_step_by_the_decision(decision: Decision, batch: CommitBatch, step: Step) -> None:
    assert next_step(decision, batch, UUID) is step


def test_a_later_batch_in_the_topic_fails_the_commit() -> None:
    with pytest.raises(CheckpointCopied, match="batch 6 is in the topic already, written by run older") as copied:
        next_step(replace(RECORDED, batch_id=6), BATCH, UUID)
    assert (copied.value.facts["batch_id"], copied.value.facts["transactional_id"]) == (5, "tx")


def test_the_same_batch_of_another_input_fails_the_commit() -> None:
    with pytest.raises(CheckpointCopied, match="wrote a batch of this number from another input") as copied:
        next_step(replace(RECORDED, fingerprint=b"other"), BATCH, UUID)
    assert (copied.value.facts["batch_id"], copied.value.facts["transactional_id"]) == (5, "tx")


PAST = replace(RECORDED, batch_id=3, query_id="q")
OF_QUERY = replace(BATCH, query_id="q", fingerprint_of=lambda batch_id: b"mine %d" % batch_id)


def test_a_batch_after_one_of_another_input_fails_the_commit() -> None:
    """Two copies of a checkpoint went on, and a batch without rows left no decision that one of them would meet."""
    for batch in (OF_QUERY, replace(OF_QUERY, run_id=""), replace(OF_QUERY, skip_if_recorded=True, session_id="s")):
        with pytest.raises(CheckpointCopied, match="run older wrote batch 3 from another input than this") as copied:
            next_step(PAST, batch, UUID)
        assert copied.value.facts["batch_id"] == 5
    # Written by a run that is not known, over a decision of this one: it bears this one's name, and another's writer.
    with pytest.raises(CheckpointCopied):
        next_step(replace(PAST, run_id="run", writers=(Writer(OTHER, "", "s"),)), OF_QUERY, UUID)


@pytest.mark.parametrize(
    ("decision", "batch"),
    [
        (replace(PAST, fingerprint=b"mine 3"), OF_QUERY),
        (replace(PAST, fingerprint=b""), OF_QUERY),
        (PAST, replace(OF_QUERY, fingerprint_of=lambda batch_id: b"")),  # Spark has deleted the file
        (PAST, replace(OF_QUERY, query_id="r")),  # another query's number has another meaning
        (replace(PAST, query_id=""), replace(OF_QUERY, query_id="")),
        (replace(PAST, run_id="run"), OF_QUERY),
        (replace(PAST, writers=(Writer(OTHER, "run", "s"),)), OF_QUERY),
        (replace(PAST, run_id="", writers=(Writer(OTHER, "", "s"),)), replace(OF_QUERY, run_id="", session_id="s")),
    ],
)
def test_a_batch_goes_on_after_one_that_its_checkpoint_may_have_written(decision: Decision, batch: CommitBatch) -> None:
    assert next_step(decision, batch, UUID) is Step.PREPARE


def test_a_run_that_was_replaced_is_refused_whatever_is_recorded() -> None:
    for decision in (replace(RECORDED, done=False), RECORDED, replace(RECORDED, batch_id=1)):
        with pytest.raises(RunFenced, match="run run of transaction 'tx' was replaced by run older"):
            next_step(replace(decision, replaced_runs=("a", "run")), BATCH, UUID)


@pytest.mark.parametrize(
    ("recorded_by", "writer", "says"),
    [
        ("q", "r", "version 5, which query q wrote to topic 'out', and this write belongs to query r. Skipping"),
        ("q", "", "which query q wrote to topic 'out', and this write belongs to no known query. In foreachBatch, set"),
        ("", "r", "which a write outside any query wrote to topic 'out', and this write belongs to query r. "),
    ],
)
def test_a_version_that_another_query_or_none_recorded_fails_the_write(
    recorded_by: str, writer: str, says: str
) -> None:
    for version in (5, 3):
        with pytest.raises(VersionOfAnother) as raised:
            next_step(
                replace(RECORDED, query_id=recorded_by), replace(NUMBERED, query_id=writer, batch_id=version), UUID
            )
        assert says in str(raised.value)
        assert "`kafkalog transactions forget 'my app' out`" in str(raised.value)


IN_QUERY = replace(NUMBERED, query_id="q")
RECORDED_IN_QUERY = replace(RECORDED, query_id="q")


def test_a_version_below_the_recorded_one_of_the_same_query_fails_the_write() -> None:
    """Spark runs no micro-batch again but the last: the checkpoint is an older one, and its rows may be others."""
    with pytest.raises(CheckpointCopied, match=r"already, written by run older\. Skipping the write could lose"):
        next_step(replace(RECORDED_IN_QUERY, batch_id=6), IN_QUERY, UUID)
    with pytest.raises(CheckpointCopied, match="run older wrote a batch of this number from another input"):
        next_step(replace(RECORDED_IN_QUERY, fingerprint=b"other"), IN_QUERY, UUID)
    assert next_step(replace(RECORDED_IN_QUERY, fingerprint=b""), IN_QUERY, UUID) is Step.CLAIM


def test_a_second_write_of_a_version_by_a_run_that_wrote_it_or_was_skipped_for_it_fails() -> None:
    wrote, skipped = Writer(OTHER, "older", "s"), Writer(b"e" * 16, "run", "t")
    for writers in ((skipped,), (wrote, skipped), (skipped, wrote)):
        with pytest.raises(VersionWrittenTwice, match=r"run run has another write.*Two writes to one topic need"):
            next_step(replace(RECORDED_IN_QUERY, writers=writers), IN_QUERY, UUID)
    for decision, batch, step in (
        (replace(RECORDED_IN_QUERY, writers=(wrote,)), IN_QUERY, Step.CLAIM),  # a run before wrote it
        (replace(RECORDED_IN_QUERY, writers=(wrote, Writer(UUID, "run"))), IN_QUERY, Step.SKIP),
        (replace(RECORDED_IN_QUERY, writers=(wrote,)), replace(IN_QUERY, run_id=""), Step.SKIP),  # a run not known
        (replace(RECORDED, writers=(skipped,)), NUMBERED, Step.SKIP),  # a job outside any query
        (replace(RECORDED_IN_QUERY, batch_id=4, writers=(skipped,)), IN_QUERY, Step.PREPARE),
    ):
        assert next_step(decision, batch, UUID) is step


def test_a_run_whose_id_is_not_known_is_distinguished_by_its_session() -> None:
    unknown = replace(IN_QUERY, run_id="", session_id="s")
    for writer, batch in (
        (Writer(OTHER, "", "s"), unknown),
        (Writer(OTHER, "run", "s"), unknown),
        (Writer(OTHER, "", "s"), replace(IN_QUERY, session_id="s")),
    ):
        with pytest.raises(VersionWrittenTwice):
            next_step(replace(RECORDED_IN_QUERY, writers=(writer,)), batch, UUID)
    for writer, batch in (
        (Writer(OTHER, "", "of a run before"), unknown),
        (Writer(OTHER, "run", ""), unknown),
        (Writer(OTHER, "older", "s"), replace(IN_QUERY, session_id="s")),  # where both are known, the ids count
    ):
        assert next_step(replace(RECORDED_IN_QUERY, writers=(writer,)), batch, UUID) is Step.CLAIM


def test_a_decision_names_the_writes_that_the_last_runs_have_of_its_batch() -> None:
    assert decided(Decision("tx"), BATCH, UUID).writers == decided(Decision("tx"), NUMBERED, UUID).writers == ()
    decision = decided(Decision("tx"), replace(IN_QUERY, session_id="s"), UUID)
    assert decision.writers == (Writer(UUID, "run", "s"),)
    for number in range(24):
        decision = claimed(decision, replace(IN_QUERY, run_id=f"run {number}"), b"%16d" % number)
    assert decision.writers == tuple(Writer(b"%16d" % number, f"run {number}") for number in range(4, 24))
    assert (decision.run_id, decision.replaced_runs, decision.commit_uuid) == ("run", (), UUID)
    assert decided(decision, replace(IN_QUERY, batch_id=6), OTHER).writers == (Writer(OTHER, "run"),)


@pytest.mark.parametrize(
    ("decision", "batch", "recorded"),
    [
        (Decision("tx"), BATCH, False),
        (replace(RECORDED, batch_id=4), BATCH, False),
        (replace(RECORDED, batch_id=6), BATCH, None),
        (replace(RECORDED, commit_uuid=UUID), BATCH, True),
        (RECORDED, BATCH, True),
        (replace(RECORDED, done=False), BATCH, True),
        (replace(RECORDED, fingerprint=b"other"), BATCH, None),
        (RECORDED_IN_QUERY, IN_QUERY, True),
        (RECORDED_IN_QUERY, replace(IN_QUERY, query_id="r"), None),
    ],
)
def test_a_batch_is_recorded_by_any_attempt(decision: Decision, batch: CommitBatch, recorded: bool | None) -> None:
    assert is_recorded(decision, batch, UUID) is recorded


def test_a_batch_whose_run_is_not_known_replaces_no_run() -> None:
    decision = decided(Decision("tx"), BATCH, UUID)
    decision = decided(decision, replace(BATCH, run_id=""), UUID)
    assert (decision.run_id, decision.replaced_runs) == ("run", ())
    assert decided(decision, replace(BATCH, run_id="next"), UUID).replaced_runs == ("run",)


def test_a_transaction_that_was_forgotten_takes_no_batch_any_more() -> None:
    with pytest.raises(CountMoved, match="its count was forgotten") as moved:
        next_step(Decision("tx", 4, stays=True, forgotten=True), BATCH, UUID)
    assert moved.value.facts == {"transactional_id": "tx", "version": 5}


def test_a_decision_remembers_the_last_20_runs_that_were_replaced() -> None:
    decision = Decision("tx")
    for number in range(25):
        decision = decided(decision, replace(BATCH, run_id=f"run {number}"), UUID)
        decision = decided(decision, replace(BATCH, run_id=f"run {number}"), UUID)
    assert decision.replaced_runs == tuple(f"run {number}" for number in range(4, 24))


def test_a_decision_holds_the_partitions_as_ranges() -> None:
    parts = [StagedPartition("t", b"t" * 16, number, UUID, 0, 1, 1, 1) for number in (3, 0, 1, 1)]
    parts.append(StagedPartition("s", b"s" * 16, 7, UUID, 0, 1, 1, 1))
    found = decided(Decision("tx", 4), replace(BATCH, parts=parts), UUID)
    assert [(topic.topic, topic.partitions) for topic in found.topics] == [("s", ((7, 7),)), ("t", ((0, 1), (3, 3)))]
    assert found.version == 4


# --- over decisions that are read and written as the test says, without a broker


class Registry:
    """In the place of a Cluster: `reads` are what brokers answer in turn, the last of them from then on; a decision is
    taken only at `version`."""

    settings = ClientSettings.parse({})

    def __init__(self, *reads: Decision, version: int = -2) -> None:
        self.reads = list(reads)
        self.version = version
        self.written: list[Decision] = []
        self.released: list[pb.ForgetStagedRequest] = []

    def call(self, method: str, request: Any, **how: Any) -> Any:
        if method == "ReadDecisions":
            found = self.reads.pop(0) if len(self.reads) > 1 else self.reads[0]
            return pb.Decisions(decisions=[decision_to_wire(found)])
        if method == "ListDecisions":
            return pb.Decisions(decisions=map(decision_to_wire, self.reads))
        if method == "ForgetStaged":
            self.released.append(request)
            return pb.ForgetStagedReply()
        assert method == "Decide"
        decision = decision_from_wire(request.decision)
        if decision.version != self.version:
            raise DecisionMoved(
                transactional_id=decision.transactional_id, expected=decision.version, version=self.version
            )
        self.written.append(decision)
        self.version += 1
        return pb.DecideReply(version=self.version)

    def leader_of(self, partition: TopicPartition, topic_id: bytes) -> tuple[None, SimpleNamespace]:
        return None, SimpleNamespace(broker_id=0)

    def pause(self, seconds: float) -> None:
        """At once."""


def coordinator_over(registry: Registry) -> Any:
    return TransactionCoordinator(cast(Cluster, registry))


OPEN = replace(RECORDED, done=False)
MOVED_ON = replace(RECORDED, version=12, batch_id=6, commit_uuid=b"n" * 16)


def test_after_a_decision_was_refused_a_read_that_lags_is_read_again() -> None:
    registry = Registry(replace(OPEN, version=3), OPEN, version=9)
    coordinator = coordinator_over(registry)
    assert coordinator._write(replace(OPEN, version=4), Patience(30)) == OPEN


def test_the_decision_that_somebody_made_after_a_batch_was_done_is_not_marked_done_with_it() -> None:
    registry = Registry(replace(MOVED_ON, done=False), version=12)
    assert coordinator_over(registry)._write_done(OPEN, Patience(30)).is_open
    assert registry.written == []


@pytest.mark.parametrize("now", [replace(OPEN, version=10, done=True), MOVED_ON, replace(MOVED_ON, done=False)])
def test_parts_that_leaders_have_forgotten_since_the_batch_was_done_are_not_lost(now: Decision) -> None:
    """Whether it was this batch that was last decided, or one after it; and whichever server was read before."""
    registry = Registry(OPEN, replace(OPEN, version=7), now, version=now.version)
    coordinator = coordinator_over(registry)
    lost = StagedPartLost(
        transactional_id="tx", batch_id=5, partition="t-0", reason="it is not prepared on this broker"
    )

    def ask(method: str, places: object, request: object, patience: Patience, settle: Any) -> None:
        assert settle(Place("t", b"t" * 16, 0), lost)

    coordinator._leaders.ask = ask
    assert coordinator.resolve("tx") == (now, [])
    assert registry.written == []


@pytest.mark.parametrize("raised", [-1, 0], ids=["nothing", "a version that a leader raised since"])
@pytest.mark.parametrize("parts_are_gone", [True, False])
def test_the_decision_of_a_batch_write_that_is_not_there_any_more_was_done(parts_are_gone: bool, raised: int) -> None:
    """Its coordinator slept for longer than it is kept; leaders may still know the batch."""
    mine = replace(OPEN, stays=False, version=3)
    registry = Registry(mine, Decision("tx", raised), version=raised)
    coordinator = coordinator_over(registry)
    lost = StagedPartLost(
        transactional_id="tx", batch_id=5, partition="t-0", reason="it is not prepared on this broker"
    )

    def ask(method: str, places: object, request: object, patience: Patience, settle: Any) -> None:
        assert not parts_are_gone or settle(Place("t", b"t" * 16, 0), lost)

    coordinator._leaders.ask = ask
    decision, losses = coordinator.resolve("tx")
    assert (decision, losses) == (replace(mine, done=True), [])
    assert registry.written == []


@pytest.mark.parametrize(
    "registry",
    [
        Registry(OPEN, version=9),
        Registry(replace(OPEN, stays=False, version=0), Decision("tx"), version=0),  # a read may have none
    ],
    ids=["stream", "batch write"],
)
def test_parts_that_are_gone_of_a_batch_that_is_not_done_are_lost(registry: Registry) -> None:
    coordinator = coordinator_over(registry)
    lost = StagedPartLost(transactional_id="tx", batch_id=5, partition="t-0", reason="gone")

    def ask(method: str, places: object, request: object, patience: Patience, settle: Any) -> None:
        assert not settle(Place("t", b"t" * 16, 0), lost)
        raise lost

    coordinator._leaders.ask = ask
    with pytest.raises(StagedPartLost):
        coordinator.resolve("tx")


@pytest.mark.parametrize(
    ("over", "now", "recorded"),
    [
        (None, RECORDED, True),  # another attempt at a stream's batch, which is the same batch
        (None, replace(RECORDED, batch_id=4), False),
        (Decision("tx", 3), replace(OPEN, version=9, commit_uuid=UUID), True),
        (Decision("tx", 3), Decision("tx", 9, stays=True, forgotten=True), None),  # after it was decided, perhaps
        (Decision("tx", 3), Decision("tx"), None),
    ],
)
def test_a_commit_that_is_given_up_looks_whether_its_batch_is_decided_all_the_same(
    over: Decision | None, now: Decision, recorded: bool | None
) -> None:
    coordinator = coordinator_over(Registry(now, version=now.version))
    assert coordinator._is_decided(_Attempt(BATCH, UUID, False, over)) is recorded


def test_the_decision_of_a_batch_write_is_not_written_again_over_a_version_that_a_leader_raised_since() -> None:
    """Both are version 0: it would stand there, open, for good."""
    mine = replace(OPEN, stays=False, version=0)
    registry = Registry(Decision("tx", 0), version=0)
    assert coordinator_over(registry)._now(mine, Patience(30)).done
    assert registry.written == []


class Forgetting(Registry):
    """The first decision is made, and its answer comes only once it was carried out and forgotten, and what was there
    before it is there again: nothing, or a version that a leader raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slept: float, before: int) -> None:
        super().__init__(Decision("tx", before), version=before)
        self.before = before
        self.now = 0.0
        self.slept = slept
        monkeypatch.setattr(transactions, "_seconds_awake_or_not", lambda: self.now)

    def call(self, method: str, request: Any, **how: Any) -> Any:
        answer = super().call(method, request, **how)
        if method == "Decide" and len(self.written) == 1:
            self.now += self.slept
            self.version = self.before
            raise RequestTimedOut(what="Decide", address="broker 0", timeout_ms=30_000)
        return answer


@pytest.mark.parametrize("slept", [1799.0, 1801.0])
@pytest.mark.parametrize("timeout_ms", [1, 60_000])
@pytest.mark.parametrize("before", [-1, 0])
def test_a_decision_that_may_be_forgotten_by_now_is_not_asked_for_again(
    before: int, timeout_ms: int, slept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to be made a second time, nor to see whether it was made: its rows are in the topic."""
    registry = Forgetting(monkeypatch, slept, before)
    settings = parse_producer({"transaction.commit.timeout.ms": timeout_ms})
    coordinator = TransactionCoordinator(cast(Cluster, registry), settings)
    coordinator._leaders.ask = lambda *asked: None  # type: ignore[method-assign, assignment]
    part = StagedPartition("t", b"t" * 16, 0, b"u" * 16, 0, 1, 100, 1)
    batch = replace(BATCH, parts=(part,), stays=False)
    if slept > BATCH_WRITE_KEPT_SECONDS / 2:
        with pytest.raises(CommitTimedOut) as over:
            coordinator.commit(batch)
        assert over.value.facts["decided"] == "unknown"
        assert len(registry.written) == 1
    else:
        with suppress(CommitTimedOut):
            coordinator.commit(batch)
        assert len(registry.written) > 1


@pytest.mark.parametrize(
    ("slept", "decision", "stays", "prepares"),
    [
        (1799.0, Decision("tx"), False, 1),
        (1801.0, Decision("tx"), False, 2),
        (1801.0, Decision("tx"), True, 2),
        (1801.0, Decision("tx", 0), True, 2),
        (1801.0, replace(RECORDED, batch_id=4), True, 1),  # it is never forgotten
    ],
)
def test_what_was_prepared_long_ago_for_a_first_decision_is_prepared_again(
    slept: float, decision: Decision, stays: bool, prepares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gave it up meanwhile raised a version that is forgotten by now; leaders have nothing of it any more."""
    registry = Registry(decision, version=decision.version)
    seconds, prepared = 0.0, 0
    monkeypatch.setattr(transactions, "_seconds_awake_or_not", lambda: seconds)

    def prepare(*_: object) -> None:
        nonlocal seconds, prepared
        seconds += slept
        prepared += 1
        if prepared == 2:
            raise StagedPartLost(transactional_id="tx", batch_id=5, partition="t-0", reason="gone")

    coordinator = coordinator_over(registry)
    coordinator._prepare = prepare
    coordinator._roll_forward = lambda decision, patience: replace(decision, done=True)
    part = StagedPartition("t", b"t" * 16, 0, UUID, 0, 1, 1, 1)
    with pytest.raises(StagedPartLost) if prepares == 2 else nullcontext():
        coordinator.commit(replace(BATCH, parts=[part], stays=stays))
    assert prepared == prepares
    assert len(registry.written) == 2 - prepares


def test_a_decision_gives_what_follows_all_of_its_time() -> None:
    seconds = 0.0
    patience = Patience(10, lambda: seconds)
    coordinator = coordinator_over(Registry(Decision("tx"), version=-1))
    coordinator._patience = lambda: patience
    coordinator._prepare = lambda *_: None
    decide = coordinator._decide

    def slowly(decision: Decision) -> int:
        nonlocal seconds
        seconds += 9
        return int(decide(decision))

    coordinator._decide = slowly

    def roll_forward(decision: Decision, patience: Patience) -> Decision:
        patience.failed(BrokerUnreachable(address="b:1", reason="down"), pause=5)
        return replace(decision, done=True)

    coordinator._roll_forward = roll_forward
    part = StagedPartition("t", b"t" * 16, 0, UUID, 0, 1, 1, 1)
    assert coordinator.commit(replace(BATCH, parts=[part])) is Outcome.COMMITTED


def test_what_is_aborted_is_not_decided_and_its_leaders_are_told_from_which_version_on() -> None:
    registry = Registry(RECORDED, version=9)
    coordinator = coordinator_over(registry)

    def prepared(partition: int, commit_uuid: bytes) -> pb.StagedSet:
        return pb.StagedSet(topic="t", topic_id=b"t" * 16, partition=partition, batch_id=6, commit_uuid=commit_uuid)

    sets = [prepared(0, OTHER), prepared(1, UUID), prepared(2, b"")]
    coordinator.staged = lambda transactional_id: sets[:1] if registry.released else sets
    assert coordinator.abort("tx") == ([sets[1]], [])
    [told] = registry.released
    assert (told.commit_uuid, told.below_version, [each.partition for each in told.partitions]) == (UUID, 10, [1])


def test_of_what_is_aborted_a_set_that_may_have_been_committed_meanwhile_is_in_neither_list_unless_it_is_kept() -> None:
    """The sets are of batches 5 to 9; while they are given up, the writer decides batch 8. A leader keeps one of 7."""
    coordinator = coordinator_over(Registry(replace(RECORDED, batch_id=5), version=9))
    sets = [
        pb.StagedSet(topic="t", topic_id=b"t" * 16, partition=0, batch_id=batch_id, commit_uuid=bytes([batch_id] * 16))
        for batch_id in (5, 6, 7, 8, 9)
    ]
    kept = sets[2]
    decisions = iter([replace(RECORDED, batch_id=5), replace(RECORDED, batch_id=8, commit_uuid=b"d" * 16)])
    listed = iter([sets, [kept]])
    coordinator.decision = lambda transactional_id: next(decisions)
    coordinator.staged = lambda transactional_id: next(listed)
    assert coordinator.abort("tx") == ([sets[0], sets[3], sets[4]], [kept])


def test_what_was_prepared_at_a_version_that_was_forgotten_is_aborted_with_a_later_one() -> None:
    """An abort raised version 0 of nothing, which was forgotten; what was prepared at it is not below the next 0."""
    registry = Registry(Decision("tx"), version=-1)
    coordinator = coordinator_over(registry)
    coordinator.staged = lambda transactional_id: [
        pb.StagedSet(topic="t", topic_id=b"t" * 16, partition=0, batch_id=6, commit_uuid=UUID, version=0)
    ]
    coordinator.abort("tx")
    [told] = registry.released
    assert told.below_version == registry.version == 1


def test_of_several_counts_none_is_forgotten_if_one_can_not_be() -> None:
    registry = Registry(RECORDED, version=9)
    coordinator = coordinator_over(registry)
    with pytest.raises(InvalidArgument, match="is decided and not everywhere yet"):
        coordinator.forget([RECORDED, replace(OPEN, transactional_id="other")])
    assert registry.written == []
    coordinator._known["tx"] = RECORDED
    coordinator.forget([RECORDED])
    assert [each.forgotten for each in registry.written] == [True]
    assert not coordinator._known


def test_of_transactions_that_end_nothing_is_kept_in_memory() -> None:
    coordinator = coordinator_over(Registry(replace(RECORDED, stays=False)))
    coordinator.decision("tx")
    assert coordinator._known == {}


def test_a_count_that_was_forgotten_is_not_listed_as_recorded() -> None:
    name = NUMBERED.transactional_id
    forgotten = Decision(name, 4, stays=True, forgotten=True)
    again = replace(RECORDED, transactional_id=f"{name}:1")
    coordinator = coordinator_over(Registry(forgotten, again, RECORDED))
    assert coordinator.recorded("my app") == coordinator.recorded("my app", "out") == [again]
    assert coordinator.recorded("my app", "other") == coordinator.recorded("my") == []


# --- end to end

PARTITIONS = 3


class Query:
    """A streaming query in small: its driver and tasks, with a run of its own."""

    def __init__(self, servers: str, topic: str, transactional_id: str, run_id: str = "run 1", **settings: Any) -> None:
        given = {"retry.backoff.ms": 10, **{name.replace("_", "."): value for name, value in settings.items()}}
        self.settings = parse_producer(given)
        connections = {name: value for name, value in given.items() if not name.startswith(("transaction", "delivery"))}
        self.cluster = Cluster(servers, **connections)
        self.coordinator = TransactionCoordinator(self.cluster, self.settings)
        self.topic = topic
        self.transactional_id = transactional_id
        self.run_id = run_id

    def stage(self, batch_id: int, rows: list[str], part: int = 0) -> list[StagedPartition]:
        with PartStager(self.cluster, self.settings, self.transactional_id, batch_id, part) as stager:
            numbers = [number % PARTITIONS for number in range(len(rows))]
            stager.stage({self.topic: pa.table({"value": rows, "partition": pa.array(numbers, pa.int32())})})
            return stager.finish()

    def batch(self, batch_id: int, parts: list[StagedPartition], fingerprint: bytes = b"") -> CommitBatch:
        return CommitBatch(self.transactional_id, batch_id, self.run_id, True, fingerprint, parts)

    def write(self, batch_id: int, rows: list[str], fingerprint: bytes = b"") -> Outcome:
        half = len(rows) // 2 // PARTITIONS * PARTITIONS
        parts = self.stage(batch_id, rows[half:], 1) + self.stage(batch_id, rows[:half], 0)
        return self.coordinator.commit(self.batch(batch_id, parts, fingerprint))

    def close(self) -> None:
        self.coordinator.close()
        self.cluster.close()


class _Died(Exception):
    """A driver that goes no further."""


def dies_before(query: Query, step: str) -> None:
    """Let a driver die before a step of its commit: prepare, decide, apply, or done."""
    coordinator: Any = query.coordinator

    def die(*_: Any, **__: Any) -> None:
        raise _Died

    if step == "done":
        coordinator._write_done = die
    elif step == "apply":
        coordinator._roll_forward = die
    elif step == "decide":
        coordinator._decide = die
    else:
        coordinator._prepare = die


StartQuery = Callable[..., Query]


@pytest.fixture
def start_query(cluster: LocalCluster, topic: str) -> Iterator[StartQuery]:
    """Starts queries that write into a topic of three partitions; a further one is another run of the same."""
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(topic, PARTITIONS)
    transactional_id = f"spark-stream-{uuid.uuid4()}"
    started = []

    def start(run_id: str = "run 1", **settings: Any) -> Query:
        query = Query(cluster.bootstrap_servers, topic, transactional_id, run_id, **settings)
        started.append(query)
        return query

    yield start
    for query in started:
        query.close()


def rows(batch_id: int, count: int = 12, attempt: str = "a") -> list[str]:
    return [f"{batch_id}.{attempt}.{number:03}" for number in range(count)]


def read(servers: str, topic: str) -> list[list[str]]:
    """The values of each partition, in order."""
    return [[(message.value or b"").decode() for message in each] for each in messages_of(servers, topic).values()]


def expected(*batches: list[str]) -> list[list[str]]:
    """What `write` puts into each partition: batch after batch, each in the order of its parts."""
    found: list[list[str]] = [[] for _ in range(PARTITIONS)]
    for each in batches:
        for number, row in enumerate(each):
            found[number % PARTITIONS].append(row)
    return found


def test_batches_are_read_whole_in_order_and_once(start_query: StartQuery, cluster: LocalCluster, topic: str) -> None:
    query = start_query()
    for batch_id in range(4):
        assert query.write(batch_id, rows(batch_id)) is Outcome.COMMITTED
    assert read(cluster.bootstrap_servers, topic) == expected(*(rows(number) for number in range(4)))
    decision = query.coordinator.decision(query.transactional_id)
    assert (decision.batch_id, decision.done, decision.run_id) == (3, True, "run 1")
    assert [each.partitions for each in decision.topics] == [((0, 2),)]


def test_what_is_committed_is_found_by_its_time(start_query: StartQuery, cluster: LocalCluster, topic: str) -> None:
    query = start_query()
    times = pa.array([1_000_000, 9_000_000], pa.timestamp("us", "UTC"))
    with PartStager(query.cluster, query.settings, query.transactional_id, 0, 0) as stager:
        numbers = pa.array([0, 0], pa.int32())
        stager.stage({topic: pa.table({"value": ["a", "b"], "timestamp": times, "partition": numbers})})
        parts = stager.finish()
    query.coordinator.commit(query.batch(0, parts))
    at = TopicPartition(topic, 0)
    with Admin(cluster.bootstrap_servers) as admin:
        found = admin.list_offsets({at: AtTimestamp(5_000_000)})[at]
    assert found is not None and found.offset == 1


def test_nothing_is_read_of_what_is_not_committed(start_query: StartQuery, cluster: LocalCluster, topic: str) -> None:
    query = start_query()
    parts = query.stage(0, rows(0))
    assert read(cluster.bootstrap_servers, topic) == expected()
    query.coordinator.abort_parts(parts)
    with pytest.raises(StagedPartLost):
        query.coordinator.commit(query.batch(0, parts))
    assert read(cluster.bootstrap_servers, topic) == expected()
    assert query.coordinator.staged(query.transactional_id) == []


@pytest.mark.parametrize(("step", "attempt"), [("prepare", "b"), ("decide", "b"), ("apply", "a"), ("done", "a")])
def test_a_batch_whose_driver_died_is_there_as_one_attempt_had_it(
    start_query: StartQuery, cluster: LocalCluster, topic: str, step: str, attempt: str
) -> None:
    dying = start_query()
    dying.write(0, rows(0), b"input 0")
    dies_before(dying, step)
    with pytest.raises(_Died):
        dying.write(1, rows(1), b"input 1")
    restarted = start_query("run 2")
    outcome = restarted.write(1, rows(1, 15, "b"), b"input 1")
    assert outcome is (Outcome.COMMITTED if attempt == "b" else Outcome.RECORDED)
    assert restarted.write(2, rows(2)) is Outcome.COMMITTED
    first = rows(1) if attempt == "a" else rows(1, 15, "b")
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0), first, rows(2))


def test_a_run_that_was_replaced_fails(start_query: StartQuery, cluster: LocalCluster, topic: str) -> None:
    zombie = start_query()
    zombie.write(0, rows(0))
    restarted = start_query("run 2")
    restarted.write(1, rows(1))
    with pytest.raises(RunFenced) as superseded:
        zombie.write(2, rows(2))
    assert superseded.value.facts["other"] == "run 2"
    again = start_query("run 1")  # another process of the same run knows it too
    with pytest.raises(RunFenced):
        again.write(2, rows(2))
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0), rows(1))


def test_an_old_checkpoint_and_a_copy_one_batch_behind_fail(
    start_query: StartQuery, cluster: LocalCluster, topic: str
) -> None:
    query = start_query()
    for batch_id in range(3):
        query.write(batch_id, rows(batch_id), b"input %d" % batch_id)
    copy = start_query("run of a copy")
    with pytest.raises(CheckpointCopied):
        copy.write(1, rows(1, attempt="b"), b"another input 1")
    with pytest.raises(CheckpointCopied):
        copy.write(2, rows(2, attempt="b"), b"another input 2")
    query.write(3, rows(3))
    assert read(cluster.bootstrap_servers, topic) == expected(*(rows(number) for number in range(4)))


def test_a_version_that_was_written_is_skipped(start_query: StartQuery, cluster: LocalCluster, topic: str) -> None:
    query = start_query()
    for version, outcome in ((7, Outcome.COMMITTED), (7, Outcome.SKIPPED), (3, Outcome.SKIPPED)):
        parts = query.stage(version, rows(version))
        batch = replace(query.batch(version, parts), skip_if_recorded=True, stays=False)
        assert query.coordinator.commit(batch) is outcome
    assert read(cluster.bootstrap_servers, topic) == expected(rows(7))


def test_what_was_staged_for_a_batch_that_is_there_already_is_dropped(start_query: StartQuery) -> None:
    query, again = start_query(), start_query("run 2")
    assert query.write(0, rows(0)) is Outcome.COMMITTED
    assert again.write(0, rows(0, attempt="b")) is Outcome.RECORDED
    older = replace(again.batch(0, again.stage(0, rows(0, attempt="c"))), skip_if_recorded=True)
    assert again.coordinator.commit(older) is Outcome.SKIPPED
    waited_for(lambda: again.coordinator.staged(query.transactional_id) == [])


@pytest.mark.parametrize("stays", [True, False])
def test_leaders_learn_whether_the_decision_stays(start_query: StartQuery, stays: bool) -> None:
    """They forget how far that one came an hour later, and 30 days later how far a stream did."""
    query = start_query()
    client: Any = query.cluster
    call, told = client.call, []

    def noted(method: str, request: Any, **more: Any) -> Any:
        if method == "ForgetStaged":
            told.append(request.stays)
        return call(method, request, **more)

    client.call = noted
    batch = query.batch(0, query.stage(0, rows(0)))
    assert query.coordinator.commit(replace(batch, stays=stays)) is Outcome.COMMITTED
    waited_for(lambda: bool(told))
    assert set(told) == {stays}


def test_a_count_that_is_forgotten_restarts_and_its_first_version_is_written(
    start_query: StartQuery,
    cluster: LocalCluster,
    topic: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, app_id = start_query(), f"app of {topic}"

    def ran(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["transactions", "forget", *arguments, "--bootstrap", cluster.bootstrap_servers])
        return (code, *capfd.readouterr())

    [topic_info] = query.cluster.describe_topics([topic])

    def write(version: int, attempt: str, query_id: str = "q") -> Outcome:
        [query.transactional_id] = query.coordinator.numbered(app_id, [topic_info])
        query.run_id = f"run {attempt}"
        batch = query.batch(version, query.stage(version, rows(version, attempt=attempt)))
        return query.coordinator.commit(replace(batch, skip_if_recorded=True, query_id=query_id))

    code, _, error = ran(app_id, topic, "--yes")
    assert code == 1 and f"no writes of txnAppId '{app_id}' to topic '{topic}' are recorded" in error
    assert write(7, "a") is Outcome.COMMITTED
    assert write(7, "b") is Outcome.SKIPPED
    with pytest.raises(VersionOfAnother):
        write(0, "c", query_id="with a new checkpoint")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    code, out, error = ran(app_id, topic)
    assert (code, out) == (2, "") and "give --yes" in error
    assert write(7, "c") is Outcome.SKIPPED  # it is not forgotten
    code, _, error = ran(f"app-{app_id}", "--yes")
    assert code == 1 and f"; in `kafkalog transactions list` it is app-{app_id}:..., give '{app_id}'" in error
    late = query.batch(8, query.stage(8, rows(8, attempt="late")))
    code, out, _ = ran(app_id, topic, "--yes", "--json")
    [told] = json.loads(out)
    assert (code, told["topic"], told["version"], told["query"]) == (0, topic, 7, "q")
    with pytest.raises(CountMoved):
        query.coordinator.commit(replace(late, skip_if_recorded=True, query_id="q"))
    assert write(0, "d", query_id="with a new checkpoint") is Outcome.COMMITTED
    assert write(0, "e", query_id="with a new checkpoint") is Outcome.SKIPPED
    assert read(cluster.bootstrap_servers, topic) == expected(rows(7), rows(0, attempt="d"))
    dies_before(query, "apply")
    with pytest.raises(_Died):
        write(1, "f", query_id="with a new checkpoint")
    code, _, error = ran(app_id, "--yes")
    assert code == 1 and "is decided and not everywhere yet, so it cannot be forgotten" in error
    del query.coordinator.__dict__["_roll_forward"]
    query.coordinator.resolve(query.transactional_id)
    assert ran(app_id, "--yes")[1] == f"forgot that {app_id} wrote version 1 to topic {topic}\n"
    assert write(1, "g") is Outcome.COMMITTED


def test_a_batch_without_parts_decides_nothing(start_query: StartQuery) -> None:
    query = start_query()
    assert query.coordinator.commit(query.batch(0, [])) is Outcome.COMMITTED
    assert query.coordinator.decision(query.transactional_id).version == -1
    query.write(2, rows(2))
    with pytest.raises(CheckpointCopied):
        query.coordinator.commit(query.batch(1, []))


@pytest.mark.parametrize("landed", [True, False])
def test_a_decision_of_unknown_outcome_is_looked_up(
    start_query: StartQuery, cluster: LocalCluster, topic: str, landed: bool
) -> None:
    query = start_query()
    coordinator: Any = query.coordinator
    decide: Any = coordinator._decide
    answers: list[Decision] = []

    def unanswered(decision: Decision) -> int:
        if not answers:
            if landed:
                decide(decision)
            answers.append(decision)
            raise BrokerUnreachable(address="broker", reason="cut")
        return int(decide(decision))

    coordinator._decide = unanswered
    assert query.write(0, rows(0)) is Outcome.COMMITTED
    assert query.write(1, rows(1)) is Outcome.COMMITTED
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0), rows(1))


def test_a_version_that_is_raised_amid_a_commit_makes_it_prepare_again(
    start_query: StartQuery, cluster: LocalCluster, topic: str
) -> None:
    query, other = start_query(), start_query()
    coordinator: Any = query.coordinator
    prepare, versions = coordinator._prepare, []

    def raised(decision: Decision, *rest: Any) -> None:
        prepare(decision, *rest)
        versions.append(decision.version)
        if len(versions) == 1:
            committer_of_other: Any = other.coordinator
            committer_of_other._decide(decision)  # as a leader does that times a prepared set out

    coordinator._prepare = raised
    assert query.write(0, rows(0)) is Outcome.COMMITTED
    assert versions == [-1, 0]
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0))


@pytest.mark.parametrize(
    ("batch_id", "is_copy", "is_undecided"), [(5, True, False), (5, False, True), (8, True, True), (8, False, True)]
)
def test_a_copy_of_what_is_done_that_a_follower_has_not_dropped_is_not_undecided(
    batch_id: int, is_copy: bool, is_undecided: bool
) -> None:
    decision = Decision("q", 1, 7, UUID, "run 1", done=True)
    staged = pb.StagedSet(commit_uuid=b"c" * 16, batch_id=batch_id, is_copy=is_copy)
    assert transactions._is_undecided(staged, decision) is is_undecided


def test_what_is_prepared_and_undecided_is_aborted_for_good(
    start_query: StartQuery, cluster: LocalCluster, topic: str
) -> None:
    query, operator = start_query(), start_query()
    dies_before(query, "decide")
    with pytest.raises(_Died):
        query.write(0, rows(0))
    given_up, kept = operator.coordinator.abort(query.transactional_id)
    assert ({each.partition for each in given_up}, kept) == ({0, 1, 2}, [])
    assert operator.coordinator.staged(query.transactional_id) == []
    assert operator.coordinator.abort(query.transactional_id) == ([], [])
    late: Any = operator.coordinator
    with pytest.raises(KafkalogError):  # the late decision of the one that was aborted
        late._decide(Decision(query.transactional_id, -1, 0, UUID, "run 1"))
    assert start_query("run 2").write(0, rows(0, attempt="b")) is Outcome.COMMITTED
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0, attempt="b"))


def test_what_a_writer_commits_while_it_is_aborted_is_not_listed_as_given_up(
    start_query: StartQuery, topic: str, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, writer = start_query(), start_query()
    dies_before(query, "decide")
    batch = query.batch(0, query.stage(0, rows(0)))
    with pytest.raises(_Died):
        query.coordinator.commit(batch)
    call = Cluster.call
    outcomes: list[Outcome] = []

    def committed_before(client: Cluster, method: str, request: Any, **how: Any) -> Any:
        if method == "ForgetStaged" and not outcomes:
            outcomes.append(Outcome.SKIPPED)  # the commit itself sends ForgetStaged too
            outcomes.append(writer.coordinator._commit(_Attempt(batch, request.commit_uuid), None))
        return call(client, method, request, **how)

    monkeypatch.setattr(Cluster, "call", committed_before)
    assert start_query().coordinator.abort(query.transactional_id) == ([], [])
    assert outcomes[1] is Outcome.COMMITTED
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0))


def test_what_a_writer_prepares_again_while_it_is_aborted_is_not_listed_as_given_up(
    start_query: StartQuery, topic: str, cluster: LocalCluster, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    query = start_query()
    dies_before(query, "decide")
    batch = query.batch(0, query.stage(0, rows(0)))
    with pytest.raises(_Died):
        query.coordinator.commit(batch)
    call = Cluster.call
    writer = start_query()

    def prepared_again(client: Cluster, method: str, request: Any, **how: Any) -> Any:
        if method == "ForgetStaged" and request.partitions[0].partition == 1:
            [part] = [part for part in batch.parts if part.partition == 1]
            decision = Decision(query.transactional_id, request.below_version)
            again = replace(batch, parts=[part])
            writer.coordinator._prepare(decision, again, request.commit_uuid, Patience(30))
        return call(client, method, request, **how)

    monkeypatch.setattr(Cluster, "call", prepared_again)
    address = ["--bootstrap", cluster.bootstrap_servers]
    assert run(["transactions", "abort", query.transactional_id, *address]) == 0
    told = capfd.readouterr().out
    assert "gave up what 2 partitions had prepared" in told
    assert f"not yet given up: what {topic}-1 has prepared" in told
    assert [each.partition for each in writer.coordinator.staged(query.transactional_id)] == [1]


def test_what_is_decided_is_resolved_and_not_aborted(
    start_query: StartQuery, cluster: LocalCluster, topic: str
) -> None:
    query, operator = start_query(), start_query()
    dies_before(query, "apply")
    with pytest.raises(_Died):
        query.write(0, rows(0))
    with pytest.raises(InvalidArgument, match="is decided, so it cannot be aborted"):
        operator.coordinator.abort(query.transactional_id)
    decision, lost = operator.coordinator.resolve(query.transactional_id)
    assert decision.done and lost == []
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0))


def test_a_commit_that_wakes_up_after_its_batch_was_done_and_forgotten_has_succeeded(
    start_query: StartQuery, cluster: LocalCluster, topic: str
) -> None:
    query, operator = start_query(), start_query()
    coordinator: Any = query.coordinator
    lost = StagedPartLost(
        transactional_id="x", batch_id=0, partition=f"{topic}-0", reason="it is not prepared on this broker"
    )

    def asleep(method: str, places: Any, request: Any, patience: Any, settle: Any, *more: Any) -> Any:
        if method == "Apply":  # meanwhile somebody else finished it; an hour later its leaders keep nothing of it
            operator.coordinator.resolve(query.transactional_id)
            for place in places:
                if not settle(place, lost):
                    raise lost
            return {}
        return ask(method, places, request, patience, settle, *more)

    ask = coordinator._leaders.ask
    coordinator._leaders.ask = asleep
    assert query.write(0, rows(0)) is Outcome.COMMITTED
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0))


def test_a_decision_whose_staged_parts_are_lost_closes_only_when_the_loss_is_accepted(
    start_query: StartQuery, cluster: LocalCluster, topic: str
) -> None:
    query, operator = start_query(), start_query()
    parts = query.stage(0, rows(0))
    coordinator: Any = query.coordinator
    coordinator._decide(decided(Decision(query.transactional_id), query.batch(0, parts), UUID))  # never prepared
    with pytest.raises(StagedPartLost):
        query.write(1, rows(1))
    with pytest.raises(StagedPartLost):
        operator.coordinator.resolve(query.transactional_id)
    decision, lost = operator.coordinator.resolve(query.transactional_id, accept_loss=True)
    assert decision.done
    assert len(lost) == PARTITIONS
    assert query.write(1, rows(1)) is Outcome.COMMITTED
    assert read(cluster.bootstrap_servers, topic) == expected(rows(1))


def test_a_topic_deleted_before_the_decision_fails_the_batch_and_after_it_does_not(
    start_query: StartQuery, cluster: LocalCluster, topic: str
) -> None:
    query = start_query()
    dies_before(query, "apply")
    with pytest.raises(_Died):
        query.write(0, rows(0))
    parts = query.stage(1, rows(1))
    with Admin(cluster.bootstrap_servers) as admin:
        admin.delete_topic(topic)
    restarted = start_query("run 2")
    with pytest.raises(UnknownTopicId):
        restarted.coordinator.commit(restarted.batch(1, parts))
    decision = restarted.coordinator.decision(query.transactional_id)
    assert (decision.batch_id, decision.done) == (0, True)


# --- commits that are given up


def cut(
    query: Query,
    *methods: str,
    heard: bool = False,
    times: int = 1000,
    which: Callable[[Any], bool] = lambda request: True,
) -> list[tuple[str, Any]]:
    """Let calls of these methods have no answer, some times; `heard`: the broker does them all the same.

    Returns:
        what was cut.
    """
    cluster: Any = query.cluster
    call: Any = cluster.call
    found: list[Any] = []

    def cut_off(method: str, request: Any, **more: Any) -> Any:
        if method not in methods or len(found) == times or not which(request):
            return call(method, request, **more)
        found.append((method, request))
        if heard:
            call(method, request, **more)
        raise BrokerUnreachable(address="broker", reason="cut")

    cluster.call = cut_off
    return found


IMPATIENT = {"transaction_commit_timeout_ms": 300}


def test_a_commit_given_up_before_its_decision_never_appears_and_may_be_written_again(
    start_query: StartQuery, cluster: LocalCluster, topic: str
) -> None:
    for method in ("Prepare", "Decide"):
        query = start_query(**IMPATIENT)
        query.transactional_id = f"spark-batch-{uuid.uuid4()}"
        late = cut(
            query, method, which=lambda request: not hasattr(request, "decision") or bool(request.decision.topics)
        )
        with pytest.raises(CommitTimedOut, match="it is not decided and will not be: none of its rows") as over:
            query.write(0, rows(0, attempt="given up"))
        assert over.value.facts["decided"] == "no"
        assert query.transactional_id in str(over.value)
        reached = start_query()
        for name, request in late:  # what was on its way all the time
            if name == "Decide":
                with pytest.raises(DecisionMoved):
                    reached.cluster.call(name, request)
    again = start_query()
    again.transactional_id = f"spark-batch-{uuid.uuid4()}"
    assert again.write(0, rows(0)) is Outcome.COMMITTED
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0))


@pytest.mark.parametrize("methods", [("Apply",), ("Decide",)])
def test_a_commit_given_up_after_its_decision_says_so_and_appears(
    start_query: StartQuery, cluster: LocalCluster, topic: str, methods: tuple[str, ...]
) -> None:
    query = start_query(**IMPATIENT)
    if "Decide" in methods:
        cut(query, "Decide", heard=True, times=1)
        cut(query, "ReadDecisions", "Decide", times=8)
    cut(query, "Apply")
    with pytest.raises(CommitTimedOut, match="it is decided: its rows are or will be in the topic, do not") as over:
        query.write(0, rows(0))
    assert over.value.facts["decided"] == "yes"
    assert f"kafkalog transactions describe {query.transactional_id}" in str(over.value)
    decision, lost = start_query().coordinator.resolve(query.transactional_id)
    assert decision.done and lost == []
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0))


def raised_twice(query: Query) -> pb.Decisions:
    """Raise a transaction's version to 1; what a broker reads whose ZooKeeper server lags, so that it has 0."""
    coordinator: Any = query.coordinator
    assert coordinator._decide(Decision(query.transactional_id)) == 0
    old = query.cluster.call("ReadDecisions", pb.ReadDecisionsRequest(transactional_ids=[query.transactional_id]))
    assert coordinator._decide(Decision(query.transactional_id, version=0)) == 1
    return cast(pb.Decisions, old)


@pytest.mark.parametrize("landed", [True, False])
def test_a_commit_given_up_says_what_is_so_although_a_read_may_be_older(
    start_query: StartQuery, cluster: LocalCluster, topic: str, landed: bool
) -> None:
    query = start_query(transaction_commit_timeout_ms=1000)
    old = raised_twice(query)
    coordinator: Any = query.coordinator
    client: Any = query.cluster
    call, is_decided = client.call, coordinator._is_decided
    asked = given_up = False
    stale = 3

    def gives_up(attempt: Any) -> bool | None:
        nonlocal given_up
        given_up = True
        return cast("bool | None", is_decided(attempt))

    def answered(method: str, request: Any, **more: Any) -> Any:
        nonlocal asked, stale
        if not given_up and (method == "Decide" or (method == "ReadDecisions" and asked)):
            asked = True
            if landed:
                call(method, request, **more)
            raise BrokerUnreachable(address="broker", reason="cut")
        if given_up and method == "ReadDecisions" and stale:
            stale -= 1
            return old
        return call(method, request, **more)

    coordinator._is_decided, client.call = gives_up, answered
    with pytest.raises(CommitTimedOut) as over:
        query.write(0, rows(0))
    assert over.value.facts["decided"] == ("yes" if landed else "no")
    if landed:
        start_query().coordinator.resolve(query.transactional_id)
    assert read(cluster.bootstrap_servers, topic) == expected(*[rows(0)] * landed)


@pytest.mark.parametrize("done", [False, True])
def test_a_decision_that_landed_unheard_is_found_although_a_read_may_be_older(
    start_query: StartQuery, cluster: LocalCluster, topic: str, done: bool
) -> None:
    query = start_query()
    old = raised_twice(query)
    client: Any = query.cluster
    call, prepared = client.call, []
    stale = -1

    def answered(method: str, request: Any, **more: Any) -> Any:
        nonlocal stale
        if method == "Prepare":
            prepared.append(request)
        if method == "ReadDecisions" and stale > 0:
            stale -= 1
            return old
        reply = call(method, request, **more)
        if method == "Decide" and stale < 0 and request.decision.done == done:
            stale = 3
            raise BrokerUnreachable(address="broker", reason="cut")
        return reply

    client.call = answered
    assert query.write(0, rows(0)) is Outcome.COMMITTED
    assert stale == 0
    assert len(prepared) == 1, "a batch that is decided is prepared once more"
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0))


def test_a_commit_given_up_while_another_attempt_at_its_batch_is_decided_says_so(
    start_query: StartQuery, cluster: LocalCluster, topic: str
) -> None:
    dying = start_query()
    dies_before(dying, "apply")
    with pytest.raises(_Died):
        dying.write(0, rows(0))
    restarted = start_query("run 2", **IMPATIENT)
    cut(restarted, "Apply")
    with pytest.raises(CommitTimedOut, match="it is decided: its rows are or will be in the topic, do not") as over:
        restarted.write(0, rows(0))
    assert over.value.facts["decided"] == "yes"
    start_query().coordinator.resolve(dying.transactional_id)
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0))


@pytest.mark.parametrize("method", ["Prepare", "Decide"])
def test_a_commit_given_up_after_another_attempt_at_its_batch_was_decided_says_so(
    start_query: StartQuery, cluster: LocalCluster, topic: str, method: str
) -> None:
    restarted, zombie = start_query("run 2", **IMPATIENT), start_query()
    coordinator: Any = restarted.coordinator
    cluster_of_restarted: Any = restarted.cluster
    call, prepare, looks = cluster_of_restarted.call, coordinator._prepare, coordinator._is_decided

    def overtaken(*arguments: Any) -> None:
        if method == "Decide":
            prepare(*arguments)
        zombie.write(0, rows(0))
        cut(restarted, method, "ReadDecisions")
        if method == "Prepare":
            prepare(*arguments)

    def reached(attempt: Any) -> bool | None:
        """When the time is over brokers answer again."""
        cluster_of_restarted.call = call
        return cast(bool | None, looks(attempt))

    coordinator._prepare, coordinator._is_decided = overtaken, reached
    with pytest.raises(CommitTimedOut) as over:
        restarted.write(0, rows(0, attempt="b"))
    assert over.value.facts["decided"] == "yes"
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0))


def test_two_writes_of_one_version_fail_in_each_run_whichever_process_commits_them(
    start_query: StartQuery, cluster: LocalCluster, topic: str
) -> None:
    [info] = start_query().cluster.describe_topics([topic])

    def write(run_id: str, version: int, attempt: str) -> Outcome:
        """As in a process of its own."""
        query = start_query(run_id)
        [query.transactional_id] = query.coordinator.numbered("two writes", [info])
        batch = query.batch(version, query.stage(version, rows(version, attempt=attempt)))
        return query.coordinator.commit(replace(batch, skip_if_recorded=True, query_id="q"))

    assert write("run 1", 0, "late") is Outcome.COMMITTED
    for run_id in ("run 1", "run 2", "run 3"):
        if run_id != "run 1":
            assert write(run_id, 0, "late") is Outcome.SKIPPED
        for _ in range(2):
            with pytest.raises(VersionWrittenTwice):
                write(run_id, 0, "all")
    assert write("run 4", 0, "late") is Outcome.SKIPPED
    assert write("run 4", 1, "late") is Outcome.COMMITTED
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0, attempt="late"), rows(1, attempt="late"))


def test_of_two_writes_that_a_run_makes_at_once_one_is_skipped_and_the_other_fails(
    start_query: StartQuery, cluster: LocalCluster, topic: str
) -> None:
    """Both have read that a run before wrote the version when the first has its own recorded."""

    def numbered(query: Query, attempt: str) -> CommitBatch:
        batch = query.batch(0, query.stage(0, rows(0, attempt=attempt)))
        return replace(batch, skip_if_recorded=True, query_id="q")

    one, other = start_query("run 2"), start_query("run 2")
    before = start_query("run 1")
    [info] = before.cluster.describe_topics([topic])
    for query in (before, one, other):
        [query.transactional_id] = query.coordinator.numbered("two at once", [info])
    assert before.coordinator.commit(numbered(before, "a")) is Outcome.COMMITTED
    read_first = other.coordinator._read(other.transactional_id, other.coordinator._patience())
    assert one.coordinator.commit(numbered(one, "a")) is Outcome.SKIPPED
    late: Any = other.coordinator
    now, reads = late._read, [read_first]
    late._read = lambda *arguments: reads.pop() if reads else now(*arguments)
    with pytest.raises(VersionWrittenTwice):
        late.commit(numbered(other, "b"))
    assert not reads
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0))


def test_a_second_write_that_is_given_up_is_not_taken_for_the_first() -> None:
    first = Writer(OTHER, "run")
    assert is_recorded(replace(RECORDED_IN_QUERY, writers=(first,), done=False), IN_QUERY, UUID) is None
    assert is_recorded(replace(RECORDED_IN_QUERY, writers=(first,)), replace(IN_QUERY, run_id="next"), UUID) is True


def test_a_commit_whose_outcome_nobody_tells_says_that_it_is_not_known(start_query: StartQuery) -> None:
    query = start_query(**IMPATIENT)
    decide: Any = query.coordinator
    asks = decide._decide

    def unanswered(decision: Decision) -> int:
        cut(query, "Decide", "ReadDecisions", heard=True)
        return int(asks(decision))

    decide._decide = unanswered
    with pytest.raises(CommitTimedOut, match="whether it is decided is not known: do not write its rows again") as over:
        query.write(0, rows(0))
    assert over.value.facts["decided"] == "unknown"


def test_a_commit_given_up_while_its_count_is_forgotten_says_that_it_is_not_known(
    start_query: StartQuery, topic: str
) -> None:
    """It may have been decided and done before that: what is forgotten tells of no batch."""
    query, operator = start_query(**IMPATIENT), start_query()
    [info] = query.cluster.describe_topics([topic])
    [query.transactional_id] = query.coordinator.numbered(topic, [info])
    assert query.write(0, rows(0)) is Outcome.COMMITTED
    coordinator: Any = query.coordinator
    client: Any = query.cluster
    call, prepare, looks = client.call, coordinator._prepare, coordinator._is_decided

    def forgotten(*arguments: Any) -> None:
        prepare(*arguments)
        operator.coordinator.forget([operator.coordinator.decision(query.transactional_id)])
        cut(query, "Decide", "ReadDecisions")

    def reached(attempt: Any) -> bool | None:
        client.call = call
        return cast("bool | None", looks(attempt))

    coordinator._prepare, coordinator._is_decided = forgotten, reached
    with pytest.raises(CommitTimedOut) as over:
        query.write(1, rows(1))
    assert over.value.facts["decided"] == "unknown"


def test_a_lookup_of_topics_that_fails_fails_no_commit(start_query: StartQuery, topic: str) -> None:
    query = start_query()
    parts = query.stage(0, rows(0))
    fresh = start_query()
    missed = cut(fresh, "DescribeTopics", times=1)
    fresh.coordinator.look_up([topic])
    assert missed
    assert fresh.coordinator.commit(fresh.batch(0, parts)) is Outcome.COMMITTED


# --- the command line


def test_the_command_line_shows_and_ends_what_is_prepared_or_decided(
    start_query: StartQuery, cluster: LocalCluster, topic: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def ran(command: str, *more: str) -> str:
        capfd.readouterr()
        code = run(["transactions", command, *more, "--bootstrap", cluster.bootstrap_servers])
        out, err = capfd.readouterr()
        assert (code, err) == (0, ""), err
        return out

    query = start_query()
    name = query.transactional_id
    assert run(["transactions", "describe", name, "--bootstrap", cluster.bootstrap_servers]) == 1
    assert "nothing of it is decided or staged" in capfd.readouterr().err
    dies_before(query, "decide")
    with pytest.raises(_Died):
        query.write(0, rows(0))
    [prepared] = [row for row in json.loads(ran("list", "--json")) if row["transaction"] == name]
    assert (prepared["state"], prepared["batch"], prepared["partitions"]) == ("prepared", 0, 3)
    assert "gave up what 3 partitions had prepared" in ran("abort", name)
    assert "is prepared and undecided" in ran("abort", name)
    late = query.stage(0, rows(0))
    producer = f"producer {producer_id_of(name)}"  # parts do not say of which transaction they are
    [staged] = [row for row in json.loads(ran("list", "--json")) if row["transaction"] == producer]
    assert (staged["state"], staged["batch"], staged["partitions"]) == ("staged", 0, 3)
    query.coordinator.abort_parts(late)
    query = start_query("run 2")
    dies_before(query, "apply")
    with pytest.raises(_Died):
        query.write(0, rows(0))
    described = json.loads(ran("describe", name, "--json"))
    assert (described["decided"]["state"], described["decided"]["run"]) == ("decided", "run 2")
    assert {each["state"] for each in described["staged"]} == {"prepared"}
    assert "batch 0 is decided, by run run 2" in ran("describe", name)
    assert run(["transactions", "abort", name, "--bootstrap", cluster.bootstrap_servers]) == 1
    assert f"batch 0 of transaction {name} is done" in ran("resolve", name)
    assert [row["state"] for row in json.loads(ran("list", "--json")) if row["transaction"] == name] == ["done"]
    assert read(cluster.bootstrap_servers, topic) == expected(rows(0))
    parts = query.stage(1, rows(1))
    lost: Any = query.coordinator
    del lost._roll_forward
    lost._decide(decided(lost.decision(name), query.batch(1, parts), UUID))  # never prepared
    assert run(["transactions", "resolve", name, "--bootstrap", cluster.bootstrap_servers]) == 1
    closed = ran("resolve", name, "--accept-loss")
    assert "batch 1 of transaction" in closed
    assert closed.count("lost: staged rows of") == PARTITIONS
