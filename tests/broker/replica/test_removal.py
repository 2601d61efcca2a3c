"""Which logs are removed because their partitions were moved, and which are not, whatever ZooKeeper has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.replica.removal import Removal
from broker.replica.undone import Undone
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import ManualClock
from kafkalog.errors import StorageFailed
from kafkalog.zk import paths, registry
from kafkalog.zk.registry import PartitionState
from tests.broker.storage.batches import TOPIC_ID, topic

KEY = (TOPIC_ID, 0)
MOVED = PartitionState(1, 5, (1,), (), {1: "disk-1"}, 7, (1,))


class _Metadata:
    """Knows one topic."""

    session = None

    def __init__(self) -> None:
        self.ids: dict[bytes, Any] = {TOPIC_ID: None}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[LogDirectory]:
    opened = LogDirectory(tmp_path / "data")
    opened.start()
    opened.open_log(*KEY, "t-0", topic(), None)
    yield opened
    opened.close()


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, PartitionState]:
    """The current states by path."""
    found: dict[str, PartitionState] = {}

    def current(_: object, wanted: Sequence[str]) -> dict[str, PartitionState]:
        return {path: found[path] for path in wanted if path in found}

    monkeypatch.setattr(registry, "current_states", current)
    return found


def removal(directory: LogDirectory) -> Removal:
    metadata: Any = _Metadata()
    made = Removal(0, directory, metadata, Undone(ManualClock()))
    made.moved("t", KEY)
    return made


def test_a_log_is_removed_by_a_state_that_names_others(
    directory: LogDirectory, states: dict[str, PartitionState]
) -> None:
    states[paths.partition_state("t", *KEY)] = MOVED
    removal(directory).remove({})
    assert directory.existing() == []


@pytest.mark.parametrize(
    "state",
    [
        None,
        PartitionState.only(1, "disk-1"),  # as it is written again after a loss: it names no replicas
        PartitionState(1, 5, (1,), (), {}, 7, (1,), (0, 1)),
        PartitionState(1, 5, (1,), (), {}, 7, (1, 0)),
        PartitionState(-1, 5, (), (), {}, 7, (0,), (1,)),
    ],
)
def test_a_log_stays_without_such_a_state(
    directory: LogDirectory, states: dict[str, PartitionState], state: PartitionState | None
) -> None:
    if state is not None:
        states[paths.partition_state("t", *KEY)] = state
    waiting = removal(directory)
    waiting.remove({})
    assert directory.existing() == [KEY]
    states[paths.partition_state("t", *KEY)] = MOVED
    waiting.remove({})
    assert directory.existing() == ([] if state is None else [KEY]), "the next news of the state would name it again"


def test_a_log_that_is_hosted_again_stays(directory: LogDirectory, states: dict[str, PartitionState]) -> None:
    states[paths.partition_state("t", *KEY)] = MOVED
    removal(directory).remove({KEY})
    assert directory.existing() == [KEY]


def test_a_removal_that_fails_is_tried_again(
    directory: LogDirectory, states: dict[str, PartitionState], monkeypatch: pytest.MonkeyPatch
) -> None:
    states[paths.partition_state("t", *KEY)] = MOVED
    waiting = removal(directory)

    def fails(*_: object) -> None:
        raise StorageFailed(directory="data", reason="it is tested")

    with monkeypatch.context() as failing:
        failing.setattr(directory, "remove_log", fails)
        waiting.remove({})
    assert directory.existing() == [KEY]
    waiting.remove({})
    assert directory.existing() == []
