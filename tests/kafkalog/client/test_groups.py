"""What a group's members and offsets are to a client, without brokers."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalog.client.groups import GroupMember, commit_offsets, keep_member, lag, leave_group
from kafkalog.errors import InvalidArgument
from kafkalog.records import TopicPartition
from kafkalog.wire import broker_pb2 as pb

HERE = TopicPartition("t", 0)


class Asked:
    """In the place of a Cluster: keeps what is asked, and with how much patience."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def call(self, method: str, request: Any, *, patient: bool = True) -> pb.KeepMemberReply:
        self.calls.append((method, patient))
        first = pb.GroupMember(member="first", host="h", process="7", lease_left_ms=5)
        return pb.KeepMemberReply(first=first, epoch=3)


def test_a_member_waits_for_no_broker() -> None:
    """A stream's progress has its own next attempt; it must not be held up in this one."""
    cluster: Any = Asked()
    first, epoch = keep_member(cluster, "g", GroupMember("m", "t", "h", "1"), {HERE: 1})
    leave_group(cluster, "g", "m")
    assert (first.name, first.process, first.left_ms, epoch) == ("first", "7", 5, 3)
    assert cluster.calls == [("KeepMember", False), ("KeepMember", False), ("LeaveGroup", False)]


def test_a_negative_offset_is_asked_of_nobody() -> None:
    cluster: Any = Asked()
    with pytest.raises(InvalidArgument, match="offset -1 of t-0 is negative"):
        commit_offsets(cluster, "g", {HERE: -1})
    assert cluster.calls == []
    commit_offsets(cluster, "g", {HERE: 0})
    assert cluster.calls == [("CommitOffsets", True)]


@pytest.mark.parametrize(("committed", "behind"), [(None, 8), (0, 8), (2, 8), (3, 7), (10, 0), (11, -1)])
def test_a_lag_is_of_what_the_log_has(committed: int | None, behind: int) -> None:
    assert lag(2, 10, committed) == behind
