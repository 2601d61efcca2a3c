"""States of groups as a broker reads and changes them: when it reads again, and who is woken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from broker.groups import states as module
from broker.groups.claims import Claimant, seat_of
from broker.groups.states import States
from broker.transport.lanes import LANES
from kafkalog.errors import GroupBusy, UnknownMember, UnreadableZnode, ZooKeeperUnreachable
from kafkalog.zk import groups, members, paths
from kafkalog.zk.members import GroupState, Member
from kafkalog.zk.session import BadVersion, Create, NodeExists, NoNode, ZooKeeperSession
from tests.broker.groups.sides import Side
from tests.proxy import StallingProxy
from tests.threads import join_all
from tests.waiting import waited_for


class Reads:
    """Counts how often a side reads states from ZooKeeper."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, session: ZooKeeperSession) -> None:
        self.count = 0
        get_many = session.get_many

        def counted(wanted: Sequence[str], *watch: Any, **how: Any) -> Any:
            self.count += wanted[0] == paths.group("g")
            return get_many(wanted, *watch, **how)

        monkeypatch.setattr(session, "get_many", counted)


def test_a_state_is_read_once_however_often_it_is_asked_for(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, other = new_side(), new_side()
    other.join("a", "t")
    reads = Reads(monkeypatch, side.session)
    first = side.states.read("g")
    assert all(side.states.read("g") is first for _ in range(9))
    side.states.change("g", lambda state: state)
    assert reads.count == 1


def test_a_state_is_read_once_for_threads_that_ask_at_the_same_time(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.join("a", "t")
    read, reading, may_answer = members.read_state, threading.Semaphore(0), threading.Event()

    def slow(*given: Any) -> GroupState | None:
        reading.release()
        assert may_answer.wait(30)
        return read(*given)

    monkeypatch.setattr(members, "read_state", slow)
    found: list[GroupState] = []
    threads = [threading.Thread(target=lambda: found.append(side.states.read("g"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert reading.acquire(timeout=30)
    assert not reading.acquire(timeout=0.1)
    may_answer.set()
    join_all(threads, 30)
    assert len(found) == 4 and all(each == found[0] for each in found)


def test_a_change_by_another_broker_is_read(new_side: Callable[[], Side]) -> None:
    side, other = new_side(), new_side()
    assert side.states.read("g") == GroupState()
    for generation, name in enumerate("abc", 1):
        other.join(name, "t")
        waited_for(lambda wanted=generation: side.states.read("g").generation == wanted)  # type: ignore[misc]
    groups.delete(other.session, "none")
    for name in "abc":
        other.groups.leave("g", name)
    groups.delete(other.session, "g")
    waited_for(lambda: side.states.read("g") == GroupState())


def test_what_was_written_is_read_at_once(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZooKeeper may report a change later than it answers the request that made it; here it reports none."""
    monkeypatch.setattr(side.states, "_changed", lambda path: None)
    for generation, name in enumerate("abcdefgh", 1):
        side.join(name, "t")
        assert side.states.read("g").generation == generation


def test_a_change_that_comes_while_a_state_is_read_is_not_missed(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, other = new_side(), new_side()
    other.join("a", "t")
    read = members.read_state

    def and_then_it_changes(session: ZooKeeperSession, group: str, watch: Any = None) -> GroupState | None:
        found = read(session, group, watch)
        monkeypatch.setattr(members, "read_state", read)
        changes = side.states._groups["g"].changes
        other.join("b", "t")
        known = side.states._groups["g"]
        waited_for(lambda: known.changes > changes)
        return found

    monkeypatch.setattr(members, "read_state", and_then_it_changes)
    assert list(side.states.read("g").seats) == ["a"]  # a moment old
    assert list(side.states.read("g").seats) == ["a", "b"]


@pytest.mark.parametrize("error", [BadVersion(), NoNode(), NodeExists(), groups.GuardMoved("/x")])
def test_a_change_that_others_overtook_is_decided_again_from_what_is_there(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also before ZooKeeper reports what the others did."""
    side, other = new_side(), new_side()
    monkeypatch.setattr(side.states, "_changed", lambda path: None)
    seen: list[int] = []

    def decide(state: GroupState) -> str:
        seen.append(state.generation)
        if len(seen) < 3:
            other.join(f"m{len(seen)}", "t")
            raise error
        return "decided"

    assert side.states.change("g", decide) == "decided"
    assert seen == [0, 1, 2]


NEVER = 1 << 62
"""A number that no group has given."""


def asked(states: States, way: str, look: Callable[[GroupState], GroupState | None]) -> GroupState | None:
    return states.change("g", look) if way == "change" else states.sure("g", look, NEVER)


def test_a_member_that_has_gone_is_refused_without_another_request(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its epoch does not come back, whatever this broker does not know yet."""
    side, other = new_side(), new_side()
    _, gone = other.join("a", "t")
    other.groups.leave("g", "a")
    side.states.read("g")
    for call in ("multi", "get_many", "exists"):
        monkeypatch.setattr(side.session, call, None)
    with pytest.raises(UnknownMember):
        side.states.sure("g", partial(seat_of, side.states, claimant=Claimant("g", "a", gone)), gone)


@pytest.mark.parametrize("way", ["change", "sure"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_refusal_is_one_of_the_groups_present_state(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch, way: str, is_there: bool
) -> None:
    """What another broker has written may be known here later than to its client."""
    side, other = new_side(), new_side()
    monkeypatch.setattr(side.states, "_changed", lambda path: None)
    if is_there:
        other.join("a", "t")
    assert list(side.states.read("g").seats) == ["a"] * is_there
    other.join("b", "t")

    def look(state: GroupState) -> GroupState:
        if "b" not in state.seats:
            raise UnknownMember(group="g", member="b")
        return state

    found = asked(side.states, way, look)
    assert found is not None and "b" in found.seats
    other.groups.leave("g", "b")
    side.states.wake_all()
    with pytest.raises(UnknownMember):
        asked(side.states, way, look)


def test_an_answer_for_which_nothing_was_written_is_one_of_the_groups_present_state(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, other = new_side(), new_side()
    monkeypatch.setattr(side.states, "_changed", lambda path: None)
    side.states.read("g")
    other.join("a", "t")
    assert list(side.states.change("g", lambda state: state).seats) == ["a"]
    other.join("b", "t")
    assert list(side.states.change("g", lambda state: state).seats) == ["a", "b"]


@pytest.mark.parametrize("way", ["change", "sure"])
def test_a_broker_that_is_cut_off_refuses_nothing_for_good(
    new_session: Callable[..., ZooKeeperSession], proxy: StallingProxy, side: Side, way: str
) -> None:
    cut_off = new_session(proxy, request_timeout_ms=500)
    states = States(cut_off)
    side.join("a", "t")
    states.read("g")
    proxy.hold()

    def refuse(state: GroupState) -> None:
        raise UnknownMember(group="g", member="b")

    with pytest.raises(ZooKeeperUnreachable) as raised:
        asked(states, way, refuse)
    assert raised.value.retriable
    proxy.resume()


def test_a_refusal_of_a_group_that_changes_all_the_time_says_so(
    new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, other = new_side(), new_side()
    monkeypatch.setattr(module, "_ATTEMPTS", 3)
    other.join("a", "t")

    def refuse(state: GroupState) -> None:
        other.join("a", "t")
        raise UnknownMember(group="g", member="b")

    with pytest.raises(GroupBusy):
        side.states.sure("g", refuse, NEVER)


def test_a_failure_of_a_change_is_raised_at_once_and_ends_no_other(side: Side) -> None:
    def fail(state: GroupState) -> None:
        raise ValueError(state.generation)

    with pytest.raises(ValueError, match="0"):
        side.states.change("g", fail)
    side.join("a", "t")


def test_a_change_that_is_overtaken_all_the_time_says_so(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)
    tries: list[GroupState] = []

    def overtaken(state: GroupState) -> None:
        tries.append(state)
        raise BadVersion

    with pytest.raises(GroupBusy, match="group 'g' was not changed") as raised:
        side.states.change("g", overtaken)
    assert raised.value.retriable
    assert len(tries) == module._ATTEMPTS


def test_a_change_that_is_overtaken_again_lets_others_go_first(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[tuple[float, bool]] = []

    def pause(seconds: float) -> None:
        pauses.append((seconds, side.states._groups["g"].lock.locked()))

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=pause))
    monkeypatch.setattr(module, "random", SimpleNamespace(random=lambda: 1.0))
    tries: list[GroupState] = []

    def overtaken(state: GroupState) -> None:
        tries.append(state)
        if len(tries) < 14:
            raise BadVersion

    side.states.change("g", overtaken)
    assert [seconds for seconds, _ in pauses] == [module._PAUSE_SECONDS * min(n, 10) for n in range(1, 13)]
    assert not any(is_locked for _, is_locked in pauses)


def test_changes_by_threads_of_one_broker_do_not_compete(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    members.make_group(side.session, "g")
    overtaken: list[int] = []
    write = side.states.write

    def counted(*given: Any) -> GroupState:
        try:
            return write(*given)
        except BadVersion:
            overtaken.append(1)
            raise

    monkeypatch.setattr(side.states, "write", counted)

    def count() -> None:
        for _ in range(10):
            side.states.change(
                "g", lambda state: side.states.write("g", state, replace(state, generation=state.generation + 1))
            )

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    join_all(threads, 120)
    assert side.state().generation == 40
    assert not overtaken


@pytest.fixture
def changing(side: Side) -> Iterator[Callable[[str], None]]:
    """Begins changes of a group, one of which is in the middle of it until the test ends."""
    side.join("a", "t")
    entered, go_on = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def decide(state: GroupState) -> None:
        entered.set()
        assert go_on.wait(120)

    def begin(group: str) -> None:
        known = side.states._group(group)
        changing = known.changing
        threads.append(threading.Thread(target=side.states.change, args=(group, decide)))
        threads[-1].start()
        waited_for(lambda: known.changing > changing)
        assert entered.wait(30)

    yield begin
    go_on.set()
    join_all(threads, 120)


def test_who_only_reads_waits_for_no_change(side: Side, changing: Callable[[str], None]) -> None:
    """A member whose lease is not renewed in time loses what it owns."""
    changing("g")
    side.states.wake_all()
    read: list[GroupState] = []
    reader = threading.Thread(
        target=lambda: read.append(side.states.sure("g", lambda state: state, NEVER)), daemon=True
    )
    reader.start()
    join_all([reader], 30)
    assert list(read[0].seats) == ["a"]


def test_a_group_that_many_change_holds_up_no_other(side: Side, changing: Callable[[str], None]) -> None:
    """Requests that change groups have as many threads as one lane."""
    assert LANES["zookeeper"].threads > module.CHANGING_MAX
    for _ in range(module.CHANGING_MAX):
        changing("g")
    with pytest.raises(GroupBusy) as raised:
        side.states.change("g", lambda state: state)
    assert raised.value.retriable
    side.join("a", "t", group="h")
    assert list(side.states.read("g").seats) == ["a"]


# --- descriptions of members


def test_a_member_is_read_once_in_each_epoch(new_side: Callable[[], Side], monkeypatch: pytest.MonkeyPatch) -> None:
    side, other = new_side(), new_side()
    read: list[list[str]] = []
    read_members = members.read_members

    def counted(session: ZooKeeperSession, group: str, names: Iterable[str]) -> dict[str, Member]:
        if session is side.session:
            read.append(list(names))
        return read_members(session, group, names)

    monkeypatch.setattr(members, "read_members", counted)

    def described() -> dict[str, str]:
        state = side.state()
        return {name: ",".join(each.topics) for name, each in side.states.described("g", state).items()}

    other.join("a", "t")
    other.join("b", "t")
    side.states.read("g")
    assert described() == described() == {"a": "t", "b": "t"}
    other.join("a", "u")
    assert described() == {"a": "u", "b": "t"}
    other.groups.leave("g", "b")
    assert described() == {"a": "u"} == described()
    other.join("b", "v")
    assert described() == {"a": "u", "b": "v"}
    assert read == [["a", "b"], ["a"], ["b"]]
    assert len(side.states._groups["g"].described) == 2


def test_a_state_that_cannot_be_read_is_an_error_each_time_and_no_longer_than_it_is_there(side: Side) -> None:
    side.session.create(paths.group("g"), b"{")
    for _ in range(2):
        with pytest.raises(UnreadableZnode):
            side.states.read("g")
    side.session.set(paths.group("g"), b"")
    waited_for(lambda: side.states.read("g").version == 1)


# --- news


def test_those_who_wait_for_a_group_are_woken_by_its_changes_only(new_side: Callable[[], Side]) -> None:
    side, other = new_side(), new_side()
    one, two, elsewhere = threading.Event(), threading.Event(), threading.Event()
    for group in ("g", "h"):
        members.make_group(side.session, group)
    with side.states.waiting("g", one), side.states.waiting("g", two), side.states.waiting("h", elsewhere):
        for group in ("g", "h"):
            side.states.read(group)
        assert not one.is_set()
        other.join("a", "t")
        assert one.wait(30) and two.wait(30)
        one.clear()
        side.states.read("g")
        side.join("b", "t")  # of this broker
        assert one.is_set()
        assert not elsewhere.is_set()


def test_who_no_longer_waits_is_not_woken(side: Side) -> None:
    one, two = threading.Event(), threading.Event()
    with side.states.waiting("g", one):
        with pytest.raises(KeyError), side.states.waiting("g", two):
            raise KeyError
        side.states.wake_all()
        assert one.is_set() and not two.is_set()
    one.clear()
    side.states.wake_all()
    assert not one.is_set()


def test_who_waits_at_a_broker_that_is_cut_off_is_woken_and_finds_nothing_until_it_is_back(
    new_session: Callable[..., ZooKeeperSession], proxy: StallingProxy, side: Side
) -> None:
    cut_off = new_session(proxy)
    states, waiter = States(cut_off), threading.Event()
    side.join("a", "t")
    with states.waiting("g", waiter):
        assert list(states.read("g").seats) == ["a"]
        proxy.cut()
        assert waiter.wait(60)  # another broker can tell what comes
        waited_for(lambda: not cut_off.connected)
        side.join("b", "t")
        with pytest.raises(ZooKeeperUnreachable):
            states.read("g")
        waiter.clear()
        proxy.resume()
        assert waiter.wait(60)
        waited_for(lambda: cut_off.connected)
        assert list(states.read("g").seats) == ["a", "b"]


def test_a_group_that_does_not_exist_is_neither_remembered_nor_watched(side: Side) -> None:
    """A request may name any."""
    client: Any = side.session._client
    waiter = threading.Event()
    for number in range(20):
        group = f"no-{number}"
        assert side.states.read(group) == GroupState()
        side.states.change(group, lambda state: state)
        assert side.states.read_each([group, "none"]) == {group: GroupState(), "none": GroupState()}
        with side.states.waiting(group, waiter):
            side.states.read(group)
            assert group in side.states._groups
        with pytest.raises(UnknownMember):
            side.states.sure(group, partial(seat_of, side.states, claimant=Claimant(group, "a", 1)), 1)
    side.session.create(paths.group("bad"), b"{")
    with pytest.raises(UnreadableZnode):
        side.states.read("bad")
    assert side.states._groups == {}
    assert [path for path, watches in client._data_watchers.items() if "/no-" in path and watches] == []
    side.join("a", "t")
    assert side.states._groups.keys() == {"g"}


def test_a_group_that_is_deleted_is_forgotten_when_that_is_noticed(side: Side) -> None:
    waiter = threading.Event()
    for group in ("g", "h", "i"):
        side.join("a", "t", group=group)
    with side.states.waiting("h", waiter):
        side.states.keep_only({"g"})
        assert side.states._groups.keys() == {"g", "h"}
        waiter.clear()
        side.states.read("h")
        side.join("b", "t", group="h")
        assert waiter.is_set()
    assert list(side.states.read("i").seats) == ["a"]


def test_states_of_all_groups_are_remembered(side: Side) -> None:
    names = [f"old-{number:05}" for number in range(10_500)]
    for start in range(0, len(names), 500):
        side.session.multi([Create(paths.group(name)) for name in names[start : start + 500]])
    read = side.states.read_each(names)
    again = side.states.read_each(names)
    assert all(again[name] is read[name] for name in names)


def test_a_broker_s_own_changes_find_room_in_a_group_that_many_threads_change(side: Side) -> None:
    side.join("a", "t")
    [lease] = members.read_leases(side.session, [("g", "a")])
    assert lease is not None
    known = side.states._group("g")
    known.changing = module.CHANGING_MAX
    with pytest.raises(GroupBusy):
        side.join("b", "t")
    side.groups.refresh("g")
    assert side.lapse("a", version=lease.version)
    known.changing = 0
