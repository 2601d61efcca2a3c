"""Which partitions a command waits for, by what a cluster says of them; over a real one it is in `test_records.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kafkalog import TopicPartition
from kafkalog.cli import extents
from kafkalog.client.admin import PartitionExtent

FULL = PartitionExtent(0, 5, 100)


class Described:
    """An admin of a cluster in which broker 0 is live and leads partition 0; partition 1's leader is as given. The
    broker has opened that one's log when it is asked for the second time."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.asked = 0

    def extents(self, names: object, brokers: object) -> dict[TopicPartition, PartitionExtent]:
        self.asked += 1
        opened = 1 if self.asked == 1 or self.leader > 0 else 2
        return {TopicPartition("t", number): FULL for number in range(opened)}

    def describe_cluster(self) -> SimpleNamespace:
        return SimpleNamespace(brokers=[SimpleNamespace(broker_id=0)])

    def describe_topics(self, names: object) -> list[SimpleNamespace]:
        leaders = (0, self.leader)
        return [SimpleNamespace(name="t", partition=lambda number: SimpleNamespace(leader=leaders[number]))]


@pytest.mark.parametrize(("leader", "is_waited_for"), [(0, True), (-1, True), (7, False)])
def test_a_log_that_is_being_opened_is_waited_for_and_a_broker_that_is_away_is_not(
    leader: int, is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "_LOOK_SECONDS", 0.0)
    admin: Any = Described(leader)
    served, failed = extents.readable(admin, [TopicPartition("t", number) for number in range(2)])
    assert admin.asked == 1 + is_waited_for
    assert (len(served), len(failed)) == ((2, 0) if is_waited_for else (1, 1))
    assert all("its leader, broker 7, is not registered" in str(error) for error in failed.values())
