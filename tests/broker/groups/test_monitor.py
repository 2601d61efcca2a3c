"""Looks of the monitor over a real ZooKeeper, by a manual clock: who lapses, who does not, and what is noticed."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from broker.groups.membership import Lapsed
from broker.groups.monitor import Monitor, broker_of
from kafkalog.clock import ManualClock
from kafkalog.errors import GroupBusy, GroupTooLarge, ZooKeeperUnreachable
from kafkalog.zk import groups, members, paths, registry
from kafkalog.zk.members import STREAM, Member
from kafkalog.zk.registry import BrokerRecord
from kafkalog.zk.session import Create, ZooKeeperSession
from tests.between import amid
from tests.broker.groups.sides import Side, partitions
from tests.proxy import StallingProxy
from tests.waiting import waited_for


def monitor_of(side: Side, clock: ManualClock, broker_id: int = 0) -> Monitor:
    return Monitor(broker_id, side.metadata, side.groups, clock)


@pytest.fixture
def monitor(side: Side, clock: ManualClock) -> Monitor:
    return monitor_of(side, clock)


def look_on(monitor: Monitor, clock: ManualClock, seconds: float) -> None:
    """Look each second for a time."""
    for _ in range(int(seconds)):
        clock.advance(1)
        monitor.look()


def renew(side: Side, name: str) -> None:
    members.renew(side.session, "g", name, 10_000)


def live(side: Side, group: str = "g") -> list[str]:
    return list(side.state(group).seats)


# --- leases


def test_a_member_that_is_not_renewed_lapses_after_its_session_timeout_and_others_stay(
    side: Side, clock: ManualClock, monitor: Monitor
) -> None:
    side.new_topic("t", 4)
    side.join("a", "t")
    side.join("b", "t")
    monitor.look()
    for _ in range(9):
        clock.advance(1)
        renew(side, "b")
        monitor.look()
    assert live(side) == ["a", "b"]
    clock.advance(1)
    monitor.look()
    assert live(side) == ["b"]
    assert side.shares()["b"] == partitions("t", 0, 1, 2, 3)
    look_on(monitor, clock, 8)
    assert live(side) == ["b"]
    look_on(monitor, clock, 1)
    assert live(side) == []


def test_each_member_has_the_session_timeout_that_it_wants(side: Side, clock: ManualClock, monitor: Monitor) -> None:
    for name, timeout_ms in (("short", 2_000), ("long", 60_000)):
        side.groups.join("g", Member(name, ("t",), session_timeout_ms=timeout_ms), "consumer", "sticky")
    monitor.look()
    look_on(monitor, clock, 2)
    assert live(side) == ["long"]
    look_on(monitor, clock, 57)
    assert live(side) == ["long"]
    members.renew(side.session, "g", "long", 3_000)
    look_on(monitor, clock, 3)
    assert live(side) == ["long"]
    look_on(monitor, clock, 1)
    assert live(side) == []


def test_of_a_time_in_which_it_could_not_look_half_a_second_counts(
    side: Side, clock: ManualClock, monitor: Monitor
) -> None:
    side.join("a", "t")
    monitor.look()
    look_on(monitor, clock, 8)
    for _ in range(3):
        clock.advance(3600)
        monitor.look()
    assert live(side) == ["a"]
    clock.advance(0.5)
    monitor.look()
    assert live(side) == []


def test_of_a_time_in_which_it_stood_still_in_the_middle_of_a_look_half_a_second_counts(
    side: Side, clock: ManualClock, monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.join("a", "t")
    monitor.look()
    look_on(monitor, clock, 9)
    amid(monkeypatch, side.session, "get_many", lambda: clock.advance(3600))
    monitor.look()
    assert live(side) == ["a"]
    renew(side, "a")
    monitor.look()
    look_on(monitor, clock, 9)
    assert live(side) == ["a"]
    look_on(monitor, clock, 1)
    assert live(side) == []


def test_looks_that_are_always_far_apart_end_leases_all_the_same(
    side: Side, clock: ManualClock, monitor: Monitor
) -> None:
    side.groups.join("g", Member("a", ("t",), session_timeout_ms=3_000), "consumer", "sticky")
    monitor.look()
    for _ in range(6):
        assert live(side) == ["a"]
        clock.advance(30)
        monitor.look()
    assert live(side) == []


def test_a_time_in_which_zookeeper_was_away_does_not_count(
    new_session: Callable[..., ZooKeeperSession], proxy: StallingProxy, side: Side, clock: ManualClock
) -> None:
    cut_off = Side(new_session(proxy), clock)
    monitor = monitor_of(cut_off, clock)
    side.join("a", "t")
    monitor.look()
    look_on(monitor, clock, 9)
    proxy.cut()
    waited_for(lambda: not cut_off.session.connected)
    for _ in range(20):
        clock.advance(1)
        with pytest.raises(ZooKeeperUnreachable):
            monitor.look()
    proxy.resume()
    waited_for(lambda: cut_off.session.connected)
    monitor.look()
    look_on(monitor, clock, 9)
    assert live(side) == ["a"]
    look_on(monitor, clock, 1)
    assert live(side) == []


def test_a_jump_of_the_wall_clock_removes_nobody(side: Side, clock: ManualClock, monitor: Monitor) -> None:
    side.join("a", "t")
    monitor.look()
    look_on(monitor, clock, 5)
    clock.jump(86_400)
    monitor.look()
    assert live(side) == ["a"]


def test_a_member_that_renews_just_before_its_removal_stays(
    new_side: Callable[[], Side], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, other = new_side(), new_side()
    monitor = monitor_of(side, clock)
    side.join("a", "t")
    monitor.look()
    look_on(monitor, clock, 9)
    read = members.read_leases

    def and_then_it_is_renewed(session: ZooKeeperSession, names: Sequence[tuple[str, str]]) -> object:
        found = read(session, names)
        monkeypatch.setattr(members, "read_leases", read)
        renew(other, "a")
        return found

    monkeypatch.setattr(members, "read_leases", and_then_it_is_renewed)
    look_on(monitor, clock, 1)
    assert live(side) == ["a"]
    look_on(monitor, clock, 10)
    assert live(side) == ["a"]  # the renewal counts from the look that saw it
    look_on(monitor, clock, 1)
    assert live(side) == []


def test_a_member_that_joined_again_has_a_lease_of_its_own(side: Side, clock: ManualClock, monitor: Monitor) -> None:
    side.join("a", "t")
    monitor.look()
    look_on(monitor, clock, 9)
    side.groups.leave("g", "a")
    monitor.look()
    side.join("a", "t")
    look_on(monitor, clock, 9)
    assert live(side) == ["a"]


def test_a_stream_lapses_as_a_consumer_does(side: Side, clock: ManualClock, monitor: Monitor) -> None:
    side.join("s", kind=STREAM, assignor="")
    monitor.look()
    look_on(monitor, clock, 10)
    assert live(side) == []
    assert side.state().generation == 2


# --- whose groups


def test_each_group_is_looked_after_by_one_of_the_live_brokers(
    new_side: Callable[[], Side], clock: ManualClock
) -> None:
    sides = {broker_id: new_side() for broker_id in (0, 1, 2)}
    for broker_id, side in sides.items():
        registry.register_broker(side.session, BrokerRecord(broker_id, "h", 1, 2, directory=str(broker_id)))
    names = [f"group-{number}" for number in range(24)]
    for name in names:
        sides[0].join("a", "t", group=name)

    def looked_after(brokers: Sequence[int]) -> dict[str, int]:
        """The broker by whose looks each group's member lapses."""
        found: dict[str, int] = {}
        for broker_id in brokers:
            for each in brokers:
                sides[each].metadata.read_brokers()
            monitor = monitor_of(sides[broker_id], clock, broker_id)
            monitor.look()
            look_on(monitor, clock, 10)
            for name in names:
                if not live(sides[0], name):
                    assert found.setdefault(name, broker_id) == broker_id
                    sides[0].join("a", "t", group=name)
        return found

    by_all = looked_after([0, 1, 2])
    assert by_all.keys() == set(names)
    assert set(by_all.values()) == {0, 1, 2}
    sides[2].session.delete(paths.broker(2))
    by_two = looked_after([0, 1])
    assert by_two.keys() == set(names)
    assert {name for name in names if by_all[name] != by_two[name]} == {name for name in names if by_all[name] == 2}


@pytest.mark.parametrize("brokers", [[0, 1], [1, 2, 3], list(range(8)), [7, 1000]])
def test_brokers_look_after_about_as_many_groups(brokers: list[int]) -> None:
    counts = Counter(broker_of(f"group-{number:05}", brokers) for number in range(10_000))
    assert all(0.85 < counts[each] * len(brokers) / 10_000 < 1.15 for each in brokers)


# --- partitions


def test_new_partitions_and_topics_are_noticed(side: Side, clock: ManualClock, monitor: Monitor) -> None:
    side.new_topic("logs-a", 1)
    side.join("a", pattern="logs-.*")
    side.join("n", "other", group="h")
    monitor.look()
    assert side.state().generation == 1
    side.grow("logs-a", 2)
    monitor.look()
    assert (side.state().generation, side.shares()["a"]) == (2, partitions("logs-a", 0, 1))
    side.new_topic("logs-b", 1)
    side.new_topic("mine", 1)
    monitor.look()
    assert (side.state().generation, len(side.shares()["a"])) == (3, 3)
    monitor.look()
    assert (side.state().generation, side.state("h").generation) == (3, 1)
    side.delete_topic("logs-a")
    monitor.look()
    assert (side.state().generation, side.shares()["a"]) == (4, partitions("logs-b", 0))


def test_a_topic_created_again_is_noticed(side: Side, clock: ManualClock, monitor: Monitor) -> None:
    side.new_topic("t", 1)
    side.join("a", "t")
    monitor.look()
    side.delete_topic("t")
    topic_id = side.new_topic("t", 1)
    monitor.look()
    assert (side.state().generation, side.state().topics["t"].topic_id) == (2, topic_id)
    assert side.committed() == {partitions("t", 0)[0]: 0}


def test_a_member_that_came_since_is_not_left_out_of_what_is_noticed(
    side: Side, clock: ManualClock, monitor: Monitor
) -> None:
    side.new_topic("t", 1)
    side.new_topic("u", 1)
    side.join("a", "t")
    monitor.look()
    side.join("b", "u")
    monitor.look()
    side.grow("u", 3)
    monitor.look()
    assert side.shares()["b"] == partitions("u", 0, 1, 2)


def test_a_group_made_anew_is_not_taken_for_the_one_of_before(side: Side, clock: ManualClock, monitor: Monitor) -> None:
    """Also if its state has the same version by chance."""
    side.new_topic("logs-a", 1)
    side.join("a", pattern="logs-a")
    version = side.state().version
    monitor.look()
    side.groups.leave("g", "a")
    groups.delete(side.session, "g")
    waited_for(lambda: side.states.read("g").version < 0)
    monitor.look()
    side.join("a", pattern="logs-.*")
    assert side.state().version == version
    monitor.look()
    side.new_topic("logs-b", 1)
    monitor.look()
    assert side.shares()["a"] == [*partitions("logs-a", 0), *partitions("logs-b", 0)]


def test_a_look_leaves_to_the_next_one_what_it_has_no_time_for(
    side: Side, clock: ManualClock, monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"g{number}" for number in range(7)]
    for name in names:
        side.join("a", pattern=".*", group=name)
    side.groups.join("g", Member("dead", ("t",), session_timeout_ms=3_000), "consumer", "sticky")
    monitor.look()
    refresh = side.groups.refresh

    def slowly(group: str) -> None:
        clock.advance(0.4)
        refresh(group)

    monkeypatch.setattr(side.groups, "refresh", slowly)
    for number in range(7):  # a topic comes in each look, and each group gets its turn
        side.new_topic(f"t{number}", 1)
        assert monitor.look()
        for name in names:
            members.renew(side.session, name, "a", 10_000)
    assert all(side.state(name).generation > 2 for name in names)
    while monitor.look():
        pass
    assert {len(side.state(name).topics) for name in names} == {7}
    assert live(side) == []


def test_groups_without_members_are_left_alone(side: Side, clock: ManualClock, monitor: Monitor) -> None:
    side.new_topic("t", 1)
    side.join("a", "t")
    side.groups.leave("g", "a")
    side.session.create(paths.group_topic_offsets("only-offsets", "t"))
    side.grow("t", 2)
    look_on(monitor, clock, 12)
    assert side.state().generation == 2
    assert side.state("only-offsets").generation == 0


def test_a_look_reads_leases_and_what_has_changed(
    side: Side, clock: ManualClock, monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each console consumer leaves a group behind."""
    for number in range(0, 2000, 500):
        side.session.multi([Create(paths.group(f"old-{each:04}")) for each in range(number, number + 500)])
    side.new_topic("t", 1)
    for name in "gh":
        side.join("a", "t", group=name)
    monitor.look()
    monitor.look()
    read: list[str] = []
    get_many = side.session.get_many

    def counted(wanted: Sequence[str], *watch: Any, **how: Any) -> Any:
        read.extend(wanted)
        return get_many(wanted, *watch, **how)

    monkeypatch.setattr(side.session, "get_many", counted)
    clock.advance(1)
    monitor.look()
    assert read == [paths.group_lease("g", "a"), paths.group_lease("h", "a")]
    side.states.read("g")
    side.join("b", "t")
    read.clear()
    monitor.look()
    assert paths.group("g") in read and paths.group("h") not in read
    look_on(monitor, clock, 10)
    assert live(side) == live(side, "h") == []


def test_a_change_of_leaders_has_no_group_looked_at(
    side: Side, clock: ManualClock, monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover changes the states of hundreds of partitions, one after the other."""
    side.new_topic("t", 1)
    side.join("a", "t")
    monitor.look()
    monitor.look()
    compared: list[object] = []
    is_current = side.groups.is_current

    def counted(*given: Any) -> bool:
        compared.append(given)
        return is_current(*given)

    monkeypatch.setattr(side.groups, "is_current", counted)
    topic = side.metadata.topic("t")
    registry.write_states(side.session, topic, {0: registry.PartitionState.only(5, "disk-5")})
    side.learn()
    assert side.metadata.leader_id(side.metadata.topic("t"), 0) == 5
    monitor.look()
    assert compared == []
    side.grow("t", 2)
    monitor.look()
    assert compared != []


def test_a_deleted_group_is_forgotten(new_side: Callable[[], Side], clock: ManualClock) -> None:
    side, other = new_side(), new_side()
    monitor = monitor_of(side, clock)
    for name in "gh":
        other.join("a", "t", group=name)
    monitor.look()
    assert side.states._groups.keys() == {"g", "h"}
    other.groups.leave("h", "a")
    groups.delete(other.session, "h")
    monitor.look()
    assert side.states._groups.keys() == {"g"}


def test_a_look_that_takes_long_says_so(
    side: Side, clock: ManualClock, monitor: Monitor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side.join("a", "t")
    monitor.look()
    assert "groups_looked_after_late" not in caplog.text
    amid(monkeypatch, side.session, "get_many", lambda: clock.advance(3))
    monitor.look()
    assert "groups_looked_after_late seconds=3.0" in caplog.text


# --- one group's failure


@pytest.mark.parametrize("broken", ["group", "lease", "member"])
def test_a_group_that_cannot_be_read_holds_up_no_other(
    side: Side, clock: ManualClock, monitor: Monitor, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    side.new_topic("t", 1)
    for name in ("bad", "f", "g", "z"):
        side.join("a", "t", group=name)
    path = {
        "group": paths.group("bad"),
        "lease": paths.group_lease("bad", "a"),
        "member": paths.group_member("bad", "a"),
    }[broken]
    side.session.set(path, b"{")
    side.grow("t", 2)
    monitor.look()
    assert {name: side.state(name).generation for name in ("f", "g", "z")} == {"f": 2, "g": 2, "z": 2}
    look_on(monitor, clock, 10)
    assert {name: live(side, name) for name in ("f", "g", "z")} == {"f": [], "g": [], "z": []}
    warned = [record for record in caplog.records if "group_not_looked_after" in record.getMessage()]
    assert 1 <= len(warned) <= 2 and path in warned[0].getMessage()


def test_a_group_whose_topics_have_grown_beyond_what_fits_is_tried_when_something_has_changed(
    side: Side,
    clock: ManualClock,
    monitor: Monitor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    side.new_topic("t", 900)
    side.join("a", pattern=".*")
    before = side.state()
    monkeypatch.setattr(members, "STATE_BYTES_MAX", 0)
    with pytest.raises(GroupTooLarge) as raised:
        members.check_room_for_claims("g", before)
    monkeypatch.setattr(members, "STATE_BYTES_MAX", raised.value.facts["size"] + 100)
    tried: list[str] = []
    refresh = side.groups.refresh
    monkeypatch.setattr(side.groups, "refresh", lambda group: [tried.append(group), refresh(group)])
    more = [random.Random(seed).randbytes(120).hex() for seed in (1, 2)]  # names that are not to be compressed
    for name in more:
        side.new_topic(name, 1)
    look_on(monitor, clock, 3)
    assert tried == ["g"] and caplog.text.count("would take") == 1
    assert side.state() == before, "what would not fit if each partition was claimed by itself is not written"
    for name in more:
        side.delete_topic(name)
    side.grow("t", 901)
    look_on(monitor, clock, 3)
    assert tried == ["g", "g"] and len(side.shares()["a"]) == 901


def test_a_group_that_changes_too_often_holds_up_no_other(
    side: Side, clock: ManualClock, monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bad", "g"):
        side.join("a", "t", group=name)
    lapse = side.groups.lapse

    def refused(group: str, ended: Mapping[str, Lapsed]) -> list[str]:
        if group == "bad":
            clock.advance(6)
            raise GroupBusy(group=group)
        return lapse(group, ended)

    monkeypatch.setattr(side.groups, "lapse", refused)
    monitor.look()
    look_on(monitor, clock, 10)
    monitor.look()  # the last one had no time for more
    assert live(side) == []
    monkeypatch.undo()
    look_on(monitor, clock, 1)
    assert live(side, "bad") == []


# --- the thread


def test_the_thread_looks_until_it_is_stopped_and_logs_each_failure_once(
    side: Side,
    clock: ManualClock,
    monitor: Monitor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("broker.groups.monitor.LOOK_SECONDS", 0.01)
    side.new_topic("t", 1)
    side.join("a", "t")
    away = ZooKeeperUnreachable(address="", reason="")
    outcomes = [RuntimeError("a defect"), RuntimeError("again"), away, None, RuntimeError("the next one"), None]
    looked, look = threading.Event(), monitor.look

    def failing() -> None:
        if outcomes:
            outcome = outcomes.pop(0)
            if outcome is not None:
                raise outcome
        look()
        if not outcomes:
            looked.set()

    monkeypatch.setattr(monitor, "look", failing)
    side.grow("t", 2)
    monitor.start()
    try:
        assert looked.wait(60)
    finally:
        monitor.stop()
    monitor.stop()
    assert not monitor._thread.is_alive()
    assert len(side.shares()["a"]) == 2
    told = [each.getMessage() for each in caplog.records if "groups_not_looked_after" in each.getMessage()]
    assert len(told) == 2 and "a defect" in told[0] and "the next one" in told[1]


def test_a_member_that_joins_anew_is_not_removed_for_the_lease_that_it_had_before(
    side: Side, clock: ManualClock
) -> None:
    side.new_topic("t", 2)
    side.join("b", "t")
    side.join("a", "t", instance_id="a")
    members.renew(side.session, "g", "a", 10_000)
    monitor = Monitor(0, side.metadata, side.groups, clock)
    while "a" in side.state().seats:
        members.renew(side.session, "g", "b", 10_000)
        monitor.look()
        clock.advance(0.5)
    side.join("a", "t", instance_id="a")
    members.renew(side.session, "g", "a", 10_000)  # of the same version as the one that has ended
    members.renew(side.session, "g", "b", 10_000)
    monitor.look()
    assert "a" in side.state().seats


def test_looks_that_take_long_remove_members_all_the_same(
    side: Side, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.new_topic("t", 2)
    side.join("a", "t")
    monitor = Monitor(0, side.metadata, side.groups, clock)
    read_each = side.states.read_each

    def slowly(wanted: Any) -> Any:
        clock.advance(4.0)
        return read_each(wanted)

    monkeypatch.setattr(side.states, "read_each", slowly)
    for _ in range(10):
        monitor.look()
    assert "a" not in side.state().seats
