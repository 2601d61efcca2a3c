"""The controller over a real ZooKeeper: who it is, what it writes, and that nothing is written by one that was
replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kafkalog.clock import ManualClock
from kafkalog.errors import ZooKeeperUnreachable
from kafkalog.zk import paths, registry
from kafkalog.zk.controllers import elect_controller, read_controller, resign
from kafkalog.zk.registry import PartitionState, StateChange, change_states
from kafkalog.zk.session import BadVersion, Operation, ZooKeeperSession
from tests.between import ahead
from tests.broker.controller.conftest import Side
from tests.kafkalog.zk.expiry import expire
from tests.proxy import StallingProxy
from tests.waiting import waited_for

NewSide = Callable[..., Side]
Register = Callable[[int], ZooKeeperSession]
REPLICAS = (0, 1, 2)
DISKS = {0: "disk-0", 1: "disk-1", 2: "disk-2"}
LED_BY_0 = PartitionState(0, 0, REPLICAS, (), DISKS)


# --- who is the controller


def test_one_of_several_brokers_is_the_controller_and_another_one_after_it(new_side: NewSide) -> None:
    first, second = new_side(5), new_side(6)
    assert first.until_elected() == 1
    found = read_controller(second.session)
    assert found is not None
    assert (found.broker_id, found.broker_epoch, found.epoch, found.is_own) == (5, 1, 1, False)
    assert second.controller.term is None
    first.controller.stop()
    assert second.until_elected() == 2
    assert first.controller.term is None
    assert second.session.get(paths.CONTROLLER_EPOCH)[1].version == 2


def test_a_controller_that_dies_amid_an_election_is_followed_by_another_that_finishes_it(
    new_side: NewSide, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = new_side(5), new_side(6)
    first.until_elected()
    brokers = [register(broker_id) for broker_id in REPLICAS]
    first.new_topic([REPLICAS] * 3, LED_BY_0)
    first.until(lambda: first.state("t", 2) == LED_BY_0)
    multi, died = first.session.multi, threading.Event()

    def dies(operations: Sequence[Operation]) -> None:
        """It dies after half of the changes."""
        multi(operations[:-1])
        died.set()
        first.session.close()

    monkeypatch.setattr(first.session, "multi", dies)
    brokers[0].close()
    assert died.wait(30)
    for number in range(3):
        second.until_state("t", PartitionState(1, 1, (1, 2), (), DISKS), number)
    assert second.until_elected() == 2


def test_a_late_write_of_a_controller_that_was_replaced_is_refused(
    new_side: NewSide, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = new_side(5), new_side(6)
    first.until_elected()
    brokers = [register(broker_id) for broker_id in REPLICAS]
    first.new_topic([REPLICAS], LED_BY_0)
    first.until(lambda: first.state("t") == LED_BY_0 and first.metadata.brokers.keys() == {0, 1, 2, 5, 6})
    seen: list[object] = []

    def replaced() -> None:
        """Another one is elected before the write of the first one arrives, and writes something else."""
        monkeypatch.setattr("broker.controller.controller.elect_controller", lambda *_: None)
        second.session.delete(paths.CONTROLLER)
        term = elect_controller(second.session, 6, second.registration.epoch)
        assert term is not None
        seen.append(term.epoch)

    ahead(monkeypatch, first.session, "multi", replaced)
    brokers[0].close()
    waited_for(lambda: seen == [2] and first.controller.term is None)
    topic = registry.read_topic(second.session, "t")
    assert topic is not None
    assert topic.states[0] == LED_BY_0, "nothing is written by the first one"
    monkeypatch.undo()
    resign(second.session)
    first.until_state("t", PartitionState(1, 1, (1, 2), (), DISKS))


def test_the_fence_of_a_term_holds_until_the_next_one(side: Side, register: Register) -> None:
    topic = side.new_topic([REPLICAS], LED_BY_0)
    term = side.controller.term
    assert term is not None
    found = registry.read_topic(side.session, "t")
    assert found is not None
    change = StateChange(topic, 0, found.states[0], replace(LED_BY_0, leader_epoch=50))
    side.session.delete(paths.CONTROLLER)
    waited_for(lambda: (now := side.controller.term) is not None and now.epoch == term.epoch + 1)
    with pytest.raises(BadVersion):
        change_states(side.session, [change], term.fence)


def test_a_broker_whose_session_expires_is_elected_again_in_the_same_process(side: Side, register: Register) -> None:
    brokers = [register(broker_id) for broker_id in REPLICAS]
    side.new_topic([REPLICAS], LED_BY_0)
    side.until(lambda: side.state("t") == LED_BY_0)
    expire(side.session)
    waited_for(lambda: (now := side.controller.term) is not None and now.epoch == 2)
    term = side.controller.term
    assert term is not None
    assert term.broker_epoch == side.registration.epoch == 2
    brokers[0].close()
    side.until_state("t", PartitionState(1, 1, (1, 2), (), DISKS))


def test_a_term_ends_when_its_session_is_in_doubt_and_the_next_begins_when_everything_was_read_again(
    new_side: NewSide, register: Register, proxy: StallingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = new_side(through=proxy)
    side.until_elected()
    brokers = [register(broker_id) for broker_id in REPLICAS]
    side.new_topic([REPLICAS], LED_BY_0)
    side.until(lambda: side.metadata.brokers.keys() == {0, 1, 2, 9} and side.state("t") == LED_BY_0)
    read_brokers, reads, may_read = side.metadata.read_brokers, threading.Event(), threading.Event()

    def slow() -> None:
        reads.set()
        assert may_read.wait(30)
        read_brokers()

    monkeypatch.setattr(side.metadata, "read_brokers", slow)
    elect, had_read = elect_controller, list[bool]()

    def elected(session: ZooKeeperSession, broker_id: int, epoch: int) -> object:
        had_read.append(may_read.is_set())
        return elect(session, broker_id, epoch)

    monkeypatch.setattr("broker.controller.controller.elect_controller", elected)
    brokers[0].close()
    assert reads.wait(30)
    proxy.cut()
    waited_for(lambda: side.controller.term is None)
    proxy.resume()
    waited_for(lambda: side.session.connected)
    assert not side.metadata.is_current
    may_read.set()
    side.until_state("t", PartitionState(1, 1, (1, 2), (), DISKS))
    term = side.controller.term
    assert term is not None
    assert (term.epoch, term.broker_epoch, had_read) == (2, 1, [True])
    assert side.metadata.is_current


def test_an_election_whose_answer_is_lost_begins_another_term(
    new_side: NewSide, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = new_side(5), new_side(6)
    first.until_elected()
    multi, lost = second.session.multi, list[int]()

    def unanswered(operations: Sequence[Operation]) -> None:
        multi(operations)
        if len(lost) < 2:
            lost.append(len(operations))
            raise ZooKeeperUnreachable(address="zk", reason="no answer in time")

    monkeypatch.setattr("broker.controller.controller._RETRY_SECONDS", 0.01)
    monkeypatch.setattr(second.session, "multi", unanswered)
    first.controller.stop()
    assert second.until_elected() == 4
    assert lost == [3, 4], "its own znode is replaced"


def test_a_write_whose_answer_is_lost_is_not_made_twice(
    side: Side, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers = [register(broker_id) for broker_id in REPLICAS]
    side.new_topic([REPLICAS], LED_BY_0)
    side.until(lambda: side.metadata.brokers.keys() == {0, 1, 2, 9} and side.state("t") == LED_BY_0)
    multi, lost = side.session.multi, threading.Event()

    def unanswered(operations: Sequence[Operation]) -> None:
        multi(operations)
        if not lost.is_set():
            lost.set()
            raise ZooKeeperUnreachable(address="zk", reason="no answer in time")

    monkeypatch.setattr("broker.controller.controller._RETRY_SECONDS", 0.01)
    monkeypatch.setattr(side.session, "multi", unanswered)
    brokers[0].close()
    side.until_state("t", PartitionState(1, 1, (1, 2), (), DISKS))
    assert lost.is_set()
    brokers[1].close()
    side.until_state("t", PartitionState(2, 2, (2,), (), DISKS))
    assert side.controller.term is not None and side.controller.term.epoch == 1


def test_a_registration_that_has_ended_is_not_elected(side: Side) -> None:
    side.controller.stop()
    epoch = side.registration.epoch
    side.registration.raise_epoch()
    side.metadata.wait_until(lambda: side.registration.epoch == epoch + 1, 30)
    assert elect_controller(side.session, 9, epoch) is None
    assert read_controller(side.session) is None
    assert elect_controller(side.session, 9, epoch + 1) is not None
    resign(side.session)
    resign(side.session)
    assert read_controller(side.session) is None


def test_a_broker_that_is_out_of_service_resigns(new_side: NewSide) -> None:
    first, second = new_side(5), new_side(6)
    first.until_elected()
    first.registration.withdraw()
    assert second.until_elected() == 2
    waited_for(lambda: first.controller.term is None)


def test_a_controller_resigns_when_its_broker_does_not_follow_and_stands_again_once_it_does(
    new_side: NewSide, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = new_side(5), new_side(6)
    first.until_elected()
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        assert goes_on.wait(30)

    monkeypatch.setattr(first.watcher._host, "open_for_a_turn", hang)
    first.new_topic([REPLICAS], LED_BY_0)
    assert hangs.wait(30)
    clock.advance(9.9)
    wake(first)
    assert second.controller.term is None and first.controller.term is not None
    clock.advance(0.2)
    wake(first)
    assert second.until_elected() == 2
    assert first.controller.term is None
    goes_on.set()
    second.controller.stop()
    assert first.until_elected() == 3


# --- what it writes


def test_brokers_that_die_and_come_back(side: Side, register: Register) -> None:
    brokers = [register(broker_id) for broker_id in REPLICAS]
    side.new_topic([REPLICAS], LED_BY_0, min_insync_replicas="2")
    side.until(lambda: side.metadata.brokers.keys() == {0, 1, 2, 9} and side.state("t") == LED_BY_0)
    brokers[2].close()
    side.until_state("t", PartitionState(0, 0, (0, 1), (), DISKS))
    brokers[0].close()
    side.until_state("t", PartitionState(1, 1, (1,), (0,), DISKS))
    brokers[1].close()
    side.until_state("t", PartitionState(-1, 2, (1,), (0,), DISKS))
    brokers[2] = register(2)
    side.until(lambda: 2 in side.metadata.brokers)
    brokers[0] = register(0)
    side.until_state("t", PartitionState(0, 3, (0,), (1,), DISKS))
    brokers[1] = register(1)
    side.until(lambda: 1 in side.metadata.brokers)
    assert side.state("t") == PartitionState(0, 3, (0,), (1,), DISKS, version=4), "one that joins asks the leader"


@pytest.mark.parametrize("unclean", [False, True])
def test_a_replica_that_is_not_in_sync_leads_only_if_the_topic_allows_it(
    side: Side, register: Register, unclean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    brokers = [register(broker_id) for broker_id in REPLICAS]
    allowed = str(unclean).lower()
    side.new_topic([REPLICAS], replace(LED_BY_0, isr=(0,)), unclean_leader_election_enable=allowed)
    side.until(lambda: side.metadata.brokers.keys() == {0, 1, 2, 9} and side.state("t") is not None)
    brokers[0].close()
    if unclean:
        side.until_state("t", PartitionState(1, 1, (1,), (), DISKS))
    else:
        side.until_state("t", PartitionState(-1, 1, (0,), (), DISKS))
    assert ("unclean_leader_elected partition=t-0 leader=1" in caplog.text) == unclean


def test_a_setting_that_allows_unclean_leaders_later_elects_one_then(side: Side, register: Register) -> None:
    register(1)
    topic = side.new_topic([REPLICAS], replace(LED_BY_0, isr=(0,)))
    side.until_state("t", PartitionState(-1, 1, (0,), (), DISKS))
    assert registry.update_topic(side.session, replace(topic, config={"unclean.leader.election.enable": "true"}))
    side.until_state("t", PartitionState(1, 2, (1,), (), DISKS))


def test_a_new_topic_whose_first_replica_is_dead_is_led_by_another(side: Side, register: Register) -> None:
    register(2)
    side.new_topic([REPLICAS, (2, 0, 1), (0,), (0, 1)], None)
    side.until_state("t", PartitionState(2, 0, (2,), (), {}))
    side.new_topic([(0, 2)], None, "u")
    side.until_state("u", PartitionState(2, 0, (2,), (), {}))
    assert [side.state("t", number) for number in (1, 2, 3)] == [None] * 3


def test_single_copies_are_left_alone(side: Side, register: Register) -> None:
    brokers = [register(broker_id) for broker_id in (0, 1)]
    side.new_topic([(0,)], PartitionState.only(0, "disk-0"), "single")
    side.new_topic([REPLICAS], LED_BY_0, "replicated")
    side.until_state("replicated", PartitionState(0, 0, (0, 1), (), DISKS))
    brokers[0].close()
    side.until_state("replicated", PartitionState(1, 1, (1,), (), DISKS))
    assert side.state("single") == PartitionState.only(0, "disk-0")


def test_450_partitions_fail_over_in_one_write(
    side: Side, register: Register, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    brokers = [register(broker_id) for broker_id in REPLICAS]
    for name in "ab":
        side.new_topic([REPLICAS, (0, 2, 1), (1, 0, 2)] * 75, LED_BY_0, name)
    side.until(lambda: side.metadata.brokers.keys() == {0, 1, 2, 9})
    side.until(lambda: all(side.state(name, number) == LED_BY_0 for name in "ab" for number in range(225)))
    written: list[int] = []
    multi, get_many = side.session.multi, side.session.get_many
    read: list[str] = []

    def counted(operations: Sequence[Operation]) -> None:
        written.append(len(operations))
        multi(operations)

    def reads_counted(wanted: Sequence[str], *watch: object, **how: object) -> object:
        read.extend(wanted)
        return get_many(wanted, *watch, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(side.session, "multi", counted)
    monkeypatch.setattr(side.session, "get_many", reads_counted)
    caplog.set_level("INFO")
    brokers[0].close()
    led_by = {0: (1, (1, 2)), 1: (2, (1, 2)), 2: (1, (1, 2))}
    for name in "ab":
        for number in range(225):
            leader, isr = led_by[number % 3]
            side.until_state(name, PartitionState(leader, 1, isr, (), DISKS), number)
    assert written == [451]
    assert sorted(read) == sorted(set(read)), "each state is read once"
    assert len(read) == 450
    assert "leaders_elected partitions=450 refused=0 without_leader=0" in caplog.text


def test_a_state_that_another_changes_meanwhile_is_looked_at_again(
    side: Side, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader takes a replica out of the set while the controller elects another leader."""
    brokers = [register(broker_id) for broker_id in REPLICAS]
    topic = side.new_topic([REPLICAS], LED_BY_0)
    side.until(lambda: side.metadata.brokers.keys() == {0, 1, 2, 9} and side.state("t") == LED_BY_0)
    shrunk = StateChange(topic, 0, LED_BY_0, replace(LED_BY_0, isr=(0, 2)))
    ahead(monkeypatch, registry, "change_states", lambda: change_states(brokers[1], [shrunk]))
    brokers[0].close()
    side.until_state("t", PartitionState(2, 1, (2,), (), DISKS))


def test_a_state_that_another_writes_after_an_election_counts_at_the_next(
    side: Side, register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica that had left the set was elected. The write was refused, and the partition waited for another look."""
    caplog.set_level("INFO")
    brokers = [register(broker_id) for broker_id in REPLICAS]
    topic = side.new_topic([REPLICAS], LED_BY_0)
    side.until(lambda: side.metadata.brokers.keys() == {0, 1, 2, 9} and side.state("t") == LED_BY_0)
    brokers[0].close()
    side.until_state("t", PartitionState(1, 1, (1, 2), (), DISKS))
    elected = side.state("t")
    assert elected is not None
    change_states(brokers[1], [StateChange(topic, 0, elected, replace(elected, isr=(1,)))])
    side.until_state("t", PartitionState(1, 1, (1,), (), DISKS))
    brokers[1].close()
    side.until_state("t", PartitionState(-1, 2, (1,), (), DISKS))
    assert "refused=1" not in caplog.text


# --- leaders that move


def test_a_broker_that_stops_hands_its_partitions_over_and_stays_in_sync(new_side: NewSide, register: Register) -> None:
    side, stopping = new_side(9), new_side(0)
    side.until_elected()
    register(1)
    stopping.new_topic([(0, 1)] * 2, PartitionState(0, 0, (0, 1), (), DISKS), "t")
    stopping.new_topic([(0, 1)], PartitionState(0, 0, (0,), (), DISKS), "alone")
    stopping.until(lambda: stopping.registration.leads_for_others and stopping.state("alone") is not None)
    assert not stopping.registration.wait_without_leaderships(0)
    stopping.registration.announce_stop()
    assert stopping.registration.wait_without_leaderships(30)
    for number in (0, 1):
        side.until_state("t", PartitionState(1, 1, (0, 1), (), DISKS), number)
    assert stopping.state("alone") == PartitionState(0, 0, (0,), (), DISKS), "nobody else can lead it"
    assert side.metadata.brokers[0].stopping
    side.new_topic([(7, 1)], None, "later")
    side.until_state("later", PartitionState(1, 0, (1,)))  # after a look at the others
    assert not side.controller._movable, "it is not given back"
    assert stopping.registration.epoch == 1
    expire(stopping.session)
    side.until(lambda: 0 in side.metadata.brokers and side.metadata.brokers[0].epoch == 2)
    assert side.metadata.brokers[0].stopping, "it still stops"


def test_the_preferred_leader_leads_again_once_it_was_in_sync_for_a_while(
    side: Side, register: Register, clock: ManualClock
) -> None:
    for broker_id in REPLICAS:
        register(broker_id)
    led_by_1 = PartitionState(1, 3, (1, 2), (), DISKS)
    topic = side.new_topic([REPLICAS], led_by_1)
    side.until(lambda: side.metadata.brokers.keys() == {0, 1, 2, 9} and side.state("t") == led_by_1)
    joined = replace(led_by_1, isr=(1, 2, 0))
    change_states(side.session, [StateChange(topic, 0, led_by_1, joined)])
    waited_for(lambda: list(side.controller._movable.values()) == [clock.monotonic() + 300])
    clock.advance(299)
    wake(side)
    assert side.state("t") == replace(joined, version=1)
    clock.advance(1)
    wake(side)
    side.until_state("t", PartitionState(0, 4, (1, 2, 0), (), DISKS))
    waited_for(lambda: not side.controller._movable)


def test_a_preferred_leader_that_falls_behind_again_waits_anew(
    side: Side, register: Register, clock: ManualClock
) -> None:
    brokers = [register(broker_id) for broker_id in REPLICAS]
    side.new_topic([REPLICAS], PartitionState(1, 3, REPLICAS, (), DISKS))
    waited_for(lambda: len(side.controller._movable) == 1)
    brokers[0].close()
    side.until_state("t", PartitionState(1, 3, (1, 2), (), DISKS))
    waited_for(lambda: not side.controller._movable)


def wake(side: Side) -> None:
    with side.metadata.changed:
        side.metadata.changed.notify_all()


# --- a broker that may have lost writes


# --- moves


def test_a_move_is_finished_by_whichever_controller_there_is_and_the_topic_gets_the_replicas(
    new_side: NewSide, register: Register
) -> None:
    first, second = new_side(5), new_side(6)
    first.until_elected()
    brokers = [register(broker_id) for broker_id in REPLICAS]
    moving = PartitionState(0, 1, (0, 1), (), {0: "disk-0", 1: "disk-1"}, 0, (0, 1), (1, 2), 7)
    first.new_topic([(0, 1), (0, 1)], moving)
    first.until(lambda: first.state("t", 1) == moving)
    first.controller.stop()
    second.until_elected()
    topic = registry.read_topic(second.session, "t")
    assert topic is not None
    joined = replace(moving, isr=(0, 1, 2), directories=DISKS)
    registry.write_states(second.session, topic, {0: joined})
    done = PartitionState(1, 2, (1, 2), (), {1: "disk-1", 2: "disk-2"}, 0, (1, 2))
    second.until_state("t", done)
    assert second.state("t", 1) == moving
    found = registry.read_topic(second.session, "t")
    assert found is not None
    assert (found.replicas, found.replicas_of(0)) == ([(0, 1), (0, 1)], (1, 2)), "written once all moves are over"
    registry.write_states(second.session, found, {1: joined})
    second.until_state("t", done, 1)
    second.until(lambda: second.metadata.topics["t"].replicas == [(1, 2), (1, 2)])
    brokers[1].close()
    second.until_state("t", PartitionState(2, 3, (2,), (), done.directories, 0, (1, 2)), 1)


def test_a_move_is_not_finished_while_a_broker_of_its_target_is_about_to_stop(
    new_side: NewSide, register: Register
) -> None:
    side, stopping = new_side(9), new_side(2)
    side.until_elected()
    for broker_id in (0, 1):
        register(broker_id)
    stopping.registration.announce_stop()
    side.until(lambda: side.metadata.brokers.keys() == {0, 1, 2, 9} and side.metadata.brokers[2].stopping)
    moving = PartitionState(0, 1, REPLICAS, (), DISKS, 0, (0, 1), (1, 2))
    side.new_topic([(0, 1)], moving)
    side.new_topic([(7, 1)], None, "later")
    side.until_state("later", PartitionState(1, 0, (1,)))  # after a look at the first one
    assert side.state("t") == moving


def test_one_copy_that_nobody_leads_after_a_cancelled_move_is_led_once_its_broker_is_back(
    side: Side, register: Register
) -> None:
    cancelled = PartitionState(-1, 3, (0,), (), {0: "disk-0"}, 0, (0,))
    side.new_topic([(0,)], cancelled)
    side.until(lambda: side.state("t") == cancelled)
    register(0)
    side.until_state("t", replace(cancelled, leader=0, leader_epoch=4))
