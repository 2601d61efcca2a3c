"""What a leader concludes from its followers' fetches: the high watermark, who joins the in-sync set, who leaves it."""

from __future__ import annotations

from dataclasses import replace

from broker.replica.leadership import Joining, Leadership, Pulse
from kafkalog.zk.registry import BrokerRecord, PartitionState

DIRECTORIES = {0: "a", 1: "b", 2: "c"}
ALL = (0, 1, 2)
LIVE = {number: BrokerRecord(number, "here", 1, 2, directory=DIRECTORIES[number], epoch=1) for number in ALL}


def state(*isr: int, epoch: int = 5, version: int = 1) -> PartitionState:
    return PartitionState(0, epoch, isr, (), DIRECTORIES, version)


def leading(*isr: int, min_insync: int = 2, end: int = 10, watermark: int = 8) -> Leadership:
    return Leadership(0, state(*isr), ALL, min_insync, end, 0, watermark, now=100.0)


def fetched(
    leadership: Leadership,
    broker: int,
    end: int,
    leader_end: int,
    *,
    now: float = 101.0,
    is_whole: bool = True,
    directory: str = "",
    registration: int = 1,
    connection: int = 0,
    pulse: Pulse | None = None,
) -> bool:
    """By default from the directory in the state, by the broker's registration, on a connection of its own."""
    pulse = pulse or Pulse(now, registration, connection)
    return leadership.fetched(broker, directory or DIRECTORIES[broker], pulse, end, is_whole, 0, leader_end)


def joining(leadership: Leadership, leader_end: int, now: float = 101.0) -> list[Joining]:
    return leadership.changes(now, 10.0, leader_end, LIVE)[0]


def leaving(leadership: Leadership, now: float, leader_end: int) -> list[int]:
    return leadership.changes(now, 10.0, leader_end, LIVE)[1]


def test_the_watermark_is_the_lowest_end_of_the_set_and_counts_only_this_epochs_fetches() -> None:
    leadership = leading(0, 1, 2)
    assert not leadership.advance(10, 0)  # nobody has fetched in this epoch
    fetched(leadership, 1, 10, 10)
    assert not leadership.advance(10, 0)
    fetched(leadership, 2, 9, 10)
    assert leadership.advance(10, 0)
    assert leadership.watermark == 9
    fetched(leadership, 2, 10, 10)
    assert leadership.advance(12, 0)
    assert leadership.watermark == 10


def test_the_watermark_does_not_move_below_min_insync() -> None:
    leadership = leading(0)
    assert not leadership.advance(12, 0)
    assert leadership.is_below_min
    alone = leading(0, min_insync=1)
    assert alone.advance(12, 0)
    assert alone.watermark == 12


def test_the_watermark_does_not_move_while_a_replica_outside_of_the_set_may_be_elected() -> None:
    lowered = leading(0, min_insync=1)
    lowered.adopt(PartitionState(0, 5, (0,), (2,), DIRECTORIES, 2))
    assert lowered.is_below_min
    assert not lowered.advance(12, 0)
    lowered.adopt(state(0, version=3))
    assert lowered.advance(12, 0)


def test_the_watermark_counts_a_replica_that_may_have_joined() -> None:
    leadership = leading(0, 1, min_insync=1)
    fetched(leadership, 1, 12, 12)
    assert fetched(leadership, 2, 10, 12)
    [joined] = joining(leadership, 12)
    assert joined == Joining(2, 1, "c")
    leadership.asked_to_join(joined)
    assert joining(leadership, 12) == [joined]  # until its outcome is known
    assert leadership.advance(12, 0)
    assert leadership.watermark == 10
    assert not leadership.advance(12, 0)
    leadership.nothing_asked()
    assert leadership.advance(12, 0)
    assert leadership.watermark == 12


def test_a_replica_joins_with_all_from_before_the_epoch_also_while_the_set_is_too_small() -> None:
    leadership = leading(0, 1, watermark=3)  # the epoch began at 10
    assert not fetched(leadership, 2, 9, 14)
    assert fetched(leadership, 2, 10, 14)
    below = leading(0, watermark=3)
    assert not fetched(below, 2, 9, 14)
    assert fetched(below, 2, 14, 14)
    assert not fetched(below, 0, 14, 14)  # itself
    assert not below.fetched(7, "d", Pulse(101.0, 1, 0), 14, True, 0, 14)  # no replica of it


def test_a_replica_that_joins_far_behind_has_the_time_of_a_member_to_come_to_the_end() -> None:
    """It left at the next look, and joined with the next fetch, some twenty times a second."""
    leadership = leading(0, 1)
    fetched(leadership, 1, 10, 10, now=150.0)
    assert fetched(leadership, 2, 10, 900, now=150.0)
    assert joining(leadership, 900, 150.0) == [Joining(2, 1, "c")]
    leadership.asked_to_join(Joining(2, 1, "c"))
    assert leadership.adopt(replace(state(0, 1, 2), version=leadership.state.version + 1))
    leadership.nothing_asked()
    fetched(leadership, 1, 1000, 1000, now=158.0)
    fetched(leadership, 2, 20, 1000, now=151.0)
    assert leaving(leadership, 159.0, 1000) == []
    assert leaving(leadership, 161.0, 1000) == [2]


def test_below_min_insync_a_replica_joins_only_near_the_leaders_end_also_while_others_append() -> None:
    """The watermark stands still: a member far behind would lead after a controlled stop, without acks=1 records."""
    below, pulse = leading(0, watermark=3), Pulse(101.0, 1, 0)
    for pulse.at, end, leader_end in ((101.0, 10, 900), (101.2, 500, 950), (102.1, 899, 1000), (102.2, 900, 1100)):
        assert not fetched(below, 2, end, leader_end, pulse=pulse), "what was the end for longer than a second"
        assert joining(below, leader_end, pulse.at) == []
    pulse.at = 102.3
    assert not fetched(below, 2, 1050, 1200, pulse=pulse)
    pulse.at = 102.4
    assert fetched(below, 2, 1190, 1300, pulse=pulse), "the end at 102.2"
    assert joining(below, 1300, 102.4) == [Joining(2, 1, "c")]
    assert not fetched(below, 2, 1195, 1400, pulse=Pulse(102.5, 1, 1)), "on another connection it is not known"
    fetched(below, 2, 1400, 1400, pulse=pulse)
    pulse.at = 200.0  # of other partitions: it has all, and says nothing of this one
    assert joining(below, 1400, 200.0) == [Joining(2, 1, "c")]


def test_a_replica_with_damage_does_not_join_and_a_member_stays() -> None:
    leadership = leading(0, 1)
    fetched(leadership, 1, 10, 10, is_whole=False)
    assert leadership.advance(10, 0)
    assert leaving(leadership, 102.0, 10) == []
    assert not fetched(leadership, 2, 10, 10, is_whole=False)
    assert joining(leadership, 10) == []
    assert fetched(leadership, 2, 10, 10)
    assert joining(leadership, 10) == [Joining(2, 1, "c")]


def test_a_follower_that_lags_or_never_fetched_leaves_and_an_idle_one_stays() -> None:
    leadership, idle = leading(0, 1, 2), Pulse(101.0, 1, 0)
    leadership.fetched(1, "b", idle, 10, True, 0, 10)
    fetched(leadership, 2, 4, 10)
    assert leaving(leadership, 109.0, 10) == []
    idle.at = 109.5
    assert leaving(leadership, 110.5, 10) == [2]  # counted from the beginning of the epoch
    assert leaving(leadership, 119.0, 20) == [2]  # what was appended since is no older than the look before
    assert leaving(leadership, 120.0, 20) == [1, 2]


def test_a_follower_that_has_what_there_was_at_its_last_fetch_does_not_lag() -> None:
    leadership, pulse = leading(0, 1), Pulse(101.0, 1, 0)
    fetched(leadership, 1, 10, 20, pulse=pulse)
    pulse.at = 115.0
    fetched(leadership, 1, 20, 30, pulse=pulse)
    assert leaving(leadership, 110.9, 30) == []
    assert leaving(leadership, 111.1, 30) == [1]


def test_a_dead_follower_or_one_that_is_silent_does_not_join() -> None:
    leadership = leading(0, 1)
    assert fetched(leadership, 2, 10, 10)
    assert joining(leadership, 10) == [Joining(2, 1, "c")]
    assert joining(leadership, 10, now=112.0) == []
    assert leadership.changes(101.0, 10.0, 10, {0: LIVE[0], 1: LIVE[1]})[0] == []
    again = {**LIVE, 2: replace(LIVE[2], epoch=2)}
    assert leadership.changes(101.0, 10.0, 10, again)[0] == []  # it has registered again since


def test_a_follower_that_left_on_an_earlier_connection_still_follows_on_a_later_one() -> None:
    """The end of the earlier one may be noticed late. Then what else came late on that counted again."""
    leadership = leading(0, 1)
    fetched(leadership, 1, 10, 10, connection=2)
    leadership.left(1, "b", 1)
    assert leadership.is_superseded(1, "b", 1)
    leadership.left(1, "b", 2)
    assert not leadership.is_superseded(1, "b", 1)


def test_what_another_process_of_a_members_id_has_is_not_counted_for_the_member() -> None:
    """It was cut off from ZooKeeper and comes back while its successor, with another disk, still copies."""
    leadership = leading(0, 1, min_insync=1)
    fetched(leadership, 1, 8, 12)
    fetched(leadership, 1, 12, 12, now=115.0, directory="of before", registration=-1)
    leadership.advance(12, 0)
    assert leadership.watermark == 8
    assert leaving(leadership, 116.0, 12) == [1]
    fetched(leadership, 1, 11, 12, now=117.0)
    assert leadership.advance(12, 0)
    assert leadership.watermark == 11


def test_a_replica_joins_with_what_is_in_the_directory_of_its_registration() -> None:
    leadership = leading(0, 1, min_insync=1)
    fetched(leadership, 1, 12, 12)
    fetched(leadership, 2, 12, 12, directory="of before", registration=-1)
    assert joining(leadership, 12) == []
    fetched(leadership, 2, 12, 12, directory="of before")  # under the registration of its successor
    assert joining(leadership, 12) == []
    fetched(leadership, 2, 10, 12)
    [joined] = joining(leadership, 12)
    assert joined == Joining(2, 1, "c")
    leadership.asked_to_join(joined)
    fetched(leadership, 2, 12, 12, directory="of before", registration=-1)
    assert leadership.advance(12, 0)
    assert leadership.watermark == 10
    leadership.adopt(state(0, 1, 2, version=2))
    leadership.nothing_asked()
    assert not leadership.advance(12, 0)


def test_a_replica_joins_with_all_that_was_staged_before_the_epoch_and_acknowledged_in_it() -> None:
    leadership = Leadership(0, state(0, 1), ALL, 2, 10, 100, 10, now=100.0)
    for staged_end in (-1, 99):
        assert not leadership.fetched(2, "c", Pulse(101.0, 1, 0), 10, True, staged_end, 10)
    assert leadership.fetched(2, "c", Pulse(101.0, 1, 0), 10, True, 100, 10)
    leadership.fetched(1, "b", Pulse(101.0, 1, 0), 10, True, 300, 10)
    assert leadership.advance(10, 300)
    assert leadership.staged_watermark == 300
    assert leadership.changes(101.0, 10.0, 10, LIVE)[0] == []


def test_a_state_is_adopted_if_it_is_newer_and_of_this_epoch() -> None:
    leadership = leading(0, 1)
    assert not leadership.adopt(state(0, version=1))
    assert not leadership.adopt(state(0, epoch=6, version=2))
    assert leadership.adopt(state(0, 1, 2, version=3))
    assert leadership.state.isr == (0, 1, 2)


def test_an_election_is_ruled_out_while_every_other_member_is_known_to_follow() -> None:
    leadership, pulses = leading(0, 1, 2), {number: Pulse(101.0, 1, 0) for number in (1, 2)}
    for number, pulse in pulses.items():
        leadership.fetched(number, DIRECTORIES[number], pulse, 10, True, 0, 10)
    assert not leadership.is_followed(0.0)  # a request that was sent may have waited for any time
    pulses[1].proven_at = 100.0
    assert not leadership.is_followed(90.0)
    pulses[2].proven_at = 95.0
    assert leadership.is_followed(95.0) and not leadership.is_followed(95.1)
    leadership.left(2, "c", 0)
    pulses[2].proven_at = 110.0  # its broker follows other partitions
    assert not leadership.is_followed(90.0)


def test_no_election_is_ruled_out_while_replicas_are_eligible_and_none_is_to_be_expected_of_a_set_of_one() -> None:
    assert leading(0).is_followed(100.0)
    eligible = leading(0, 1)
    pulse = Pulse(101.0, 1, 0)
    eligible.fetched(1, "b", pulse, 10, True, 0, 10)
    pulse.proven_at = 100.0
    assert eligible.is_followed(90.0)
    eligible.adopt(PartitionState(0, 5, (0, 1), (2,), DIRECTORIES, 2))
    assert not eligible.is_followed(90.0)


def test_a_partition_with_one_replica_waits_for_nobody() -> None:
    alone = Leadership(0, state(0), (0,), 2, 10, 0, 0, now=0.0)
    assert alone.is_alone
    assert alone.watermark == 0
    assert alone.advance(10, 0)
    assert alone.watermark == 10
    assert not leading(0).is_alone


def test_a_leader_is_not_alone_while_a_replica_that_was_taken_away_may_have_joined() -> None:
    leadership = leading(0, min_insync=1)
    leadership.asked_to_join(Joining(2, 1, "c"))
    leadership.adopt(replace(state(0, version=2), replicas=(0,)))
    assert not leadership.is_alone
    leadership.nothing_asked()
    assert leadership.is_alone


def test_a_replica_that_was_removed_does_not_join_by_a_state_that_is_newer_than_the_assignment() -> None:
    """The state comes with the refusal of a change, before the topic's news."""
    leadership = leading(0, 1, 2)
    leadership.adopt(replace(state(0, 1, 2, version=2), replicas=(0, 1, 2), target=(0, 1)))
    for broker in (1, 2):
        fetched(leadership, broker, 10, 10)
    assert leadership.adopt(replace(state(0, 1, version=3), replicas=(0, 1)))
    assert leadership.replicas == (0, 1)
    assert not fetched(leadership, 2, 10, 10)
    assert joining(leadership, 10) == []
    leadership.configure(ALL, 2)
    assert leadership.replicas == (0, 1), "the state counts, not the topic's znode"


def test_a_follower_holds_no_ack_until_it_may_join() -> None:
    leadership = leading(0, 1, min_insync=1)
    leadership.adopt(replace(state(0, 1, version=2), replicas=(0, 1), target=(0, 2)))
    assert not leadership.holds_no_ack(1), "it is in the set"
    assert leadership.holds_no_ack(2)
    fetched(leadership, 1, 10, 10)
    fetched(leadership, 2, 5, 10)
    leadership.advance(10, 0)
    assert (leadership.holds_no_ack(2), leadership.end_of(2)) == (True, 5)
    fetched(leadership, 2, 10, 10)
    assert not leadership.holds_no_ack(2)
    [asked] = joining(leadership, 10)
    leadership.asked_to_join(asked)
    fetched(leadership, 2, 10, 20)
    assert not leadership.holds_no_ack(2), "the watermark counts it"


def test_below_min_insync_a_follower_with_all_that_is_acknowledged_holds_acks_although_it_is_not_near_the_end() -> None:
    """It never comes near while it is held, and acks=all is refused until it has joined."""
    below, pulse = leading(0, watermark=3), Pulse(101.0, 1, 0)
    fetched(below, 2, 9, 14, pulse=pulse)
    assert below.holds_no_ack(2), "the epoch began at 10"
    assert not fetched(below, 2, 10, 14, pulse=pulse)
    assert not below.holds_no_ack(2)
