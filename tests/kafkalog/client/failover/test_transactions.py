"""The exactly-once write while leaders are killed: each batch is in the topic once, whole and in order."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from kafkalog import Admin
from kafkalog.client.transaction.coordinator import Outcome
from kafkalog.client.transaction.stager import PartStager, StagedPartition
from tests.kafkalog.client.failover.test_sending import leader_of
from tests.kafkalog.client.transaction.test_coordinator import PARTITIONS, Query, expected, read, rows
from tests.kafkalog.replicated import Brokers, wait_in_sync
from tests.threads import join_all


class Failing:
    """Kills leaders of a topic's partitions in turn, and starts them again."""

    def __init__(self, brokers: Brokers, admin: Admin, topic: str) -> None:
        self._brokers = brokers
        self._admin = admin
        self._topic = topic
        self._kills = 0
        self._away: int | None = None

    def kill(self) -> None:
        self._away = leader_of(self._admin, self._topic, self._kills % PARTITIONS)
        self._kills += 1
        self._brokers.kill(self._away)

    def heal(self) -> None:
        if self._away is not None:
            self._brokers.start(self._away)
            self._away = None
        wait_in_sync(self._admin, self._topic)


@pytest.fixture
def failing(brokers: Brokers) -> Iterator[Failing]:
    with Admin(brokers.bootstrap_servers) as admin:
        admin.create_topic("t", PARTITIONS, 3, {"min.insync.replicas": 2})
        yield Failing(brokers, admin, "t")


@pytest.fixture
def query(brokers: Brokers, failing: Failing) -> Iterator[Query]:
    started = Query(brokers.bootstrap_servers, "t", f"spark-stream-{uuid.uuid4()}")
    yield started
    started.close()


def stage(query: Query, batch_id: int, given: list[str], amid: Callable[[], None]) -> list[StagedPartition]:
    """Stage rows in two batches for each partition, with something amid them."""
    half = len(given) // 2 // PARTITIONS * PARTITIONS
    with PartStager(query.cluster, query.settings, query.transactional_id, batch_id, 0) as stager:
        for some, then in ((given[:half], amid), (given[half:], lambda: None)):
            numbers = [number % PARTITIONS for number in range(len(some))]
            stager.stage({"t": pa.table({"value": some, "partition": pa.array(numbers, pa.int32())})})
            then()
        return stager.finish()


def test_leaders_that_are_killed_while_rows_are_staged_lose_and_double_none(
    brokers: Brokers, failing: Failing, query: Query
) -> None:
    for batch_id in range(3):
        parts = stage(query, batch_id, rows(batch_id), failing.kill)
        assert query.coordinator.commit(query.batch(batch_id, parts)) is Outcome.COMMITTED
        failing.heal()
    assert read(brokers.bootstrap_servers, "t") == expected(*map(rows, range(3)))


def test_what_was_staged_is_committed_by_the_leaders_that_there_are_then(
    brokers: Brokers, failing: Failing, query: Query
) -> None:
    for batch_id in range(3):
        parts = stage(query, batch_id, rows(batch_id), lambda: None)
        failing.kill()
        assert query.coordinator.commit(query.batch(batch_id, parts)) is Outcome.COMMITTED
        failing.heal()
    assert read(brokers.bootstrap_servers, "t") == expected(*map(rows, range(3)))


@pytest.mark.parametrize("step", ["prepare", "decide", "apply", "done"])
def test_a_leader_that_is_killed_before_any_step_of_a_commit_leaves_the_batch_whole(
    brokers: Brokers, failing: Failing, query: Query, step: str
) -> None:
    of_step = {"prepare": "_prepare", "decide": "_decide", "apply": "_roll_forward", "done": "_write_done"}[step]
    go_on = getattr(query.coordinator, of_step)

    def killed_before(*given: object, **more: object) -> object:
        setattr(query.coordinator, of_step, go_on)
        failing.kill()
        return go_on(*given, **more)

    setattr(query.coordinator, of_step, killed_before)
    assert query.write(0, rows(0)) is Outcome.COMMITTED
    assert query.write(1, rows(1)) is Outcome.COMMITTED
    failing.heal()
    assert query.write(2, rows(2)) is Outcome.COMMITTED
    assert read(brokers.bootstrap_servers, "t") == expected(*map(rows, range(3)))


def test_batches_are_written_while_leaders_are_killed_at_any_time(
    brokers: Brokers, failing: Failing, query: Query
) -> None:
    written = 0
    failures: list[BaseException] = []
    stopping = threading.Event()

    def write() -> None:
        nonlocal written
        try:
            while not stopping.is_set():
                assert query.write(written, rows(written)) is Outcome.COMMITTED
                written += 1
        except BaseException as error:
            failures.append(error)

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    for _ in range(3):
        failing.kill()
        failing.heal()
    stopping.set()
    join_all([writing], 60)
    assert failures == [] and written > 0
    assert read(brokers.bootstrap_servers, "t") == expected(*map(rows, range(written)))
