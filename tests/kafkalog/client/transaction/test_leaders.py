"""Asking leaders: how long one is patient, how requests are cut, and when a topic counts as deleted. The brokers here
are scripts of answers; over real ones it is in `test_coordinator.py`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from kafkalog.client.cluster import BrokerInfo, Cluster, ClusterInfo
from kafkalog.client.config import ClientSettings
from kafkalog.client.transaction import leaders
from kafkalog.client.transaction.leaders import Leaders, OutOfPatience, Patience, Place
from kafkalog.errors import BrokerUnreachable, NoProgress, NotLeader, StagedPartLost, UnknownTopicId
from kafkalog.wire import broker_pb2
from kafkalog.wire import transactions_pb2 as pb
from kafkalog.wire.frames import error_to_wire
from tests.threads import NoThreads, join_all

PLACES = [Place("t", b"t" * 16, number) for number in range(4)]
UNREACHABLE = BrokerUnreachable(address="b:1", reason="down")


class Now:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Script:
    """A cluster in which partition n is led by broker n % 2; `answer` says what a broker answers to a call."""

    settings = ClientSettings.parse({})

    def __init__(self, answer: Callable[[str, int, Any], Any], now: Now) -> None:
        self._answer = answer
        self._now = now
        self.calls: list[tuple[int, list[int]]] = []
        self.brokers = 2
        self.moved: dict[int, int] = {}  # where partitions are once somebody asks who leads
        self._leaders: dict[int, int] = {}
        self.refreshed: list[list[str]] = []
        self.pauses: list[float] = []

    def leader_of(self, label: Any, topic_id: bytes) -> tuple[None, BrokerInfo]:
        return None, BrokerInfo(self._leaders.get(label.partition, label.partition % 2), "b", 1, 2, "", "")

    def describe(self, patient: bool = True) -> ClusterInfo:
        return ClusterInfo("c", tuple(BrokerInfo(number, "b", 1, 2, "", "") for number in range(self.brokers)), "", "")

    def refresh(self, topics: Sequence[str], patient: bool = True) -> None:
        self.refreshed.append(list(topics))
        self._leaders = self.moved

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._now.seconds += seconds

    def call(self, method: str, request: Any, *, broker_id: int, patient: bool = True) -> Any:
        if method == "Apply":
            self.calls.append((broker_id, [each.partition for each in request.partitions]))
        answer = self._answer(method, broker_id, request)
        if isinstance(answer, Exception):
            raise answer
        return answer


def applied(request: Any, **answer: Any) -> pb.ApplyReply:
    return pb.ApplyReply(partitions=[pb.AppliedPartition(**answer) for _ in request.partitions])


def asks(script: Script, patience: Patience, places: Sequence[Place] = PLACES, **more: Any) -> dict[Place, Any]:
    asked = Leaders(cast(Cluster, script))
    try:
        return asked.ask(
            "Apply",
            places,
            lambda told: pb.ApplyRequest(partitions=[{"partition": each.partition} for each in told]),
            patience,
            lambda place, error: False,
            **more,
        )
    finally:
        asked.close()


def test_as_long_as_any_partition_gets_on_nobody_gives_up() -> None:
    now = Now()
    left = 50

    def answer(method: str, broker_id: int, request: Any) -> Any:
        nonlocal left
        if broker_id == 1 and left > 1:
            return UNREACHABLE  # for all the time that the other takes
        left -= 1
        now.seconds += 9
        return applied(request, unfinished=left > 0, progress=50 - left)

    assert asks(Script(answer, now), Patience(10, now)).keys() == set(PLACES)
    assert now.seconds > 400


def test_a_leader_that_gets_on_is_not_complained_of_and_one_that_does_nothing_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = Now()
    left = 20
    steps = 1

    def answer(method: str, broker_id: int, request: Any) -> Any:
        nonlocal left
        left -= steps
        now.seconds += 1
        return applied(request, unfinished=left > 0, progress=left)

    asks(Script(answer, now), Patience(60, now), PLACES[:1])
    assert "commit_held_up" not in caplog.text
    left, steps = 20, 0
    with pytest.raises(OutOfPatience):
        asks(Script(answer, now), Patience(60, now), PLACES[:1])
    assert caplog.text.count("commit_held_up") == 1


def test_who_leads_is_asked_again_while_a_leader_works_on_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is cut off from ZooKeeper waits for followers that follow another."""
    monkeypatch.setattr(leaders, "_ROUND_SECONDS", 0.0)
    now = Now()

    def answer(method: str, broker_id: int, request: Any) -> Any:
        now.seconds += 1
        return applied(request, unfinished=broker_id == 0, progress=7)

    script = Script(answer, now)
    script.moved = {0: 1}
    assert asks(script, Patience(10, now), PLACES[:1]).keys() == {PLACES[0]}
    assert script.refreshed == [["t"]]


def test_a_partition_that_does_nothing_is_given_up_after_its_time() -> None:
    now = Now()

    def answer(method: str, broker_id: int, request: Any) -> Any:
        now.seconds += 1
        return applied(request, unfinished=True, progress=7)

    with pytest.raises(OutOfPatience) as over:
        asks(Script(answer, now), Patience(10, now), PLACES[:1])
    assert isinstance(over.value.error, NoProgress)
    assert str(over.value.error) == "Apply of t-0 at broker 0 is not finished, and has made no progress for 11 s"
    assert 10 < now.seconds < 13


def test_a_partition_that_fails_again_and_again_is_given_up_although_it_says_the_same_progress() -> None:
    now = Now()
    error = error_to_wire(NotLeader(broker_id=0, partition="t-0"))
    with pytest.raises(OutOfPatience) as over:
        asks(
            Script(lambda method, broker_id, request: applied(request, error=error, progress=3), now), Patience(10, now)
        )
    assert isinstance(over.value.error, NotLeader)
    assert now.seconds < 13


def test_partitions_that_are_done_with_the_same_again_and_again_are_progress_once() -> None:
    """As those of a batch that is prepared anew whenever its decision is refused."""
    now = Now()
    patience = Patience(10, now)
    script = Script(lambda method, broker_id, request: applied(request), now)
    for seconds in (4, 8):
        asks(script, patience)
        now.seconds = seconds
        patience.failed(UNREACHABLE)
    asks(script, patience)
    now.seconds = 12
    with pytest.raises(OutOfPatience):
        patience.failed(UNREACHABLE)


def test_an_error_that_comes_with_progress_and_without_in_turn_is_given_up() -> None:
    now = Now()
    error = error_to_wire(NotLeader(broker_id=0, partition="t-0"))
    progress = itertools.cycle([0, 3])
    script = Script(lambda method, broker_id, request: applied(request, error=error, progress=next(progress)), now)
    with pytest.raises(OutOfPatience):
        asks(script, Patience(10, lambda: now.seconds if now.seconds < 100 else pytest.fail("endless")), PLACES[:1])
    assert now.seconds < 13


def queued(*told: int) -> list[dict[str, Any]]:
    """Answers of a place whose work waits for others', at which that stands."""
    return [{"unfinished": True, "queued": True, "progress": progress} for progress in told]


def test_a_place_that_is_queued_and_fails_in_turn_is_given_up_whatever_others_do() -> None:
    now = Now()
    error = error_to_wire(NotLeader(broker_id=0, partition="t-0"))
    others = itertools.count(1_000_000, 1000)

    def answers() -> Iterator[dict[str, Any]]:
        while now.seconds < 100:
            yield from queued(next(others), next(others))
            yield {"unfinished": True, "progress": 3}
            yield {"error": error, "progress": 3}

    told = answers()

    def answer(method: str, broker_id: int, request: Any) -> Any:
        now.seconds += 1
        return applied(request, **next(told))

    with pytest.raises(OutOfPatience) as over:
        asks(Script(answer, now), Patience(10, now), PLACES[:1])
    assert now.seconds < 20
    assert isinstance(over.value.error, NotLeader)


def test_a_place_that_is_queued_waits_while_those_before_it_get_on_and_then_gets_on_itself() -> None:
    now = Now()
    told = iter(
        queued(*range(1000, 1050))
        + [{"unfinished": True, "progress": progress} for progress in range(50)]
        + [{"error": error_to_wire(NotLeader(broker_id=0, partition="t-0")), "progress": 51}]
        + [{"unfinished": True, "progress": 52}]
        + queued(*range(2000, 2050))
        + [{}]
    )

    def answer(method: str, broker_id: int, request: Any) -> Any:
        now.seconds += 1
        return applied(request, **next(told))

    asks(Script(answer, now), Patience(10, now), PLACES[:1])
    assert now.seconds > 150


def test_a_final_error_of_one_partition_is_raised() -> None:
    now = Now()
    lost = StagedPartLost(transactional_id="tx", batch_id=0, partition="t-0", reason="gone")

    def answer(method: str, broker_id: int, request: Any) -> Any:
        return applied(request, error=error_to_wire(lost)) if broker_id else applied(request)

    with pytest.raises(StagedPartLost):
        asks(Script(answer, now), Patience(10, now))


def test_a_request_is_cut_by_weight_and_what_is_left_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaders, "_WEIGHT_MAX", 10)
    now = Now()
    places = [Place("t", b"t" * 16, number * 2) for number in range(6)]
    weights = dict(zip(places, [4, 6, 30, 1, 9, 1], strict=True))
    script = Script(lambda method, broker_id, request: applied(request), now)
    assert asks(script, Patience(10, now), places, weight=weights.__getitem__).keys() == set(places)
    assert script.calls == [(0, [0, 2]), (0, [4]), (0, [6, 8]), (0, [10])]


def test_a_topic_is_deleted_only_where_every_broker_says_so() -> None:
    """One that was just made is known to some brokers a moment earlier: to take it for deleted would drop its rows."""
    now = Now()
    knows = {0: False, 1: True}
    unknown = error_to_wire(UnknownTopicId(topic_id="74" * 16))

    def answer(method: str, broker_id: int, request: Any) -> Any:
        if method == "DescribeTopics":
            described = broker_pb2.TopicDescription(name="t") if knows[broker_id] else None
            described = described or broker_pb2.TopicDescription(error=unknown)
            return broker_pb2.TopicDescriptions(topics=[described])
        return applied(request) if knows[broker_id] else applied(request, error=unknown)

    asked = Leaders(cast(Cluster, Script(answer, now)))
    assert not asked.is_deleted(b"t" * 16)
    with pytest.raises(OutOfPatience):
        asks(Script(answer, now), Patience(10, now), PLACES[:1])
    knows[1] = False
    assert asked.is_deleted(b"t" * 16)
    with pytest.raises(UnknownTopicId):
        asks(Script(answer, now), Patience(10, now), PLACES[:1])


@pytest.mark.parametrize("answered", ["unknown", "unreachable", "uncertain", "by nobody"])
def test_a_topic_of_which_not_every_broker_was_heard_is_not_deleted(answered: str) -> None:
    unknown = broker_pb2.TopicDescription(error=error_to_wire(UnknownTopicId(topic_id="74" * 16)))

    def answer(method: str, broker_id: int, request: Any) -> Any:
        if answered == "unreachable" and broker_id == 1:
            return UNREACHABLE
        is_uncertain = answered == "uncertain" and broker_id == 1
        return broker_pb2.TopicDescriptions(topics=[unknown], is_uncertain=is_uncertain)

    script = Script(answer, Now())
    script.brokers = 0 if answered == "by nobody" else 2
    assert Leaders(cast(Cluster, script)).is_deleted(b"t" * 16) == (answered == "unknown")


def test_a_place_whose_leader_failed_is_asked_for_at_the_one_that_leads_then() -> None:
    now = Now()
    script = Script(lambda method, broker_id, request: applied(request) if broker_id == 7 else UNREACHABLE, now)
    script.moved = {0: 7}
    assert asks(script, Patience(10, now), PLACES[:1]).keys() == set(PLACES[:1])
    assert script.refreshed == [["t"]]
    assert script.calls == [(0, [0]), (7, [0])]


def test_pauses_double_while_something_fails_and_restart_once_all_get_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaders, "_ROUND_SECONDS", -1.0)  # a round for each answer
    now = Now()
    script = Script(lambda method, broker_id, request: applied(request), now)
    first = script.settings.retry_backoff_ms / 1000
    error = {"error": error_to_wire(NotLeader(broker_id=0, partition="t-0"))}
    told: Iterator[dict[str, Any]]
    told = iter([error, error, error, {"unfinished": True, "progress": 1}, error, {}])
    script._answer = lambda method, broker_id, request: applied(request, **next(told))
    asks(script, Patience(60, now), PLACES[:1])
    assert script.pauses == [first, 2 * first, 4 * first, first]


def test_a_leader_that_is_away_is_tried_once_a_round_however_many_requests_its_places_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaders, "_WEIGHT_MAX", 1)
    now = Now()
    answers = itertools.chain([True], itertools.repeat(False))
    script = Script(lambda method, broker_id, request: UNREACHABLE if next(answers) else applied(request), now)
    places = [Place("t", b"t" * 16, number) for number in (0, 2, 4)]
    assert asks(script, Patience(10, now), places).keys() == set(places)
    assert script.calls == [(0, [0]), (0, [0]), (0, [2]), (0, [4])]


def test_a_leader_that_works_for_long_keeps_no_other_from_being_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaders, "_ROUND_SECONDS", -1.0)
    now = Now()
    tries = 0
    progress = itertools.count(1)

    def answer(method: str, broker_id: int, request: Any) -> Any:
        nonlocal tries
        if broker_id == 1:
            tries += 1
            return UNREACHABLE if tries < 3 else applied(request)
        said = next(progress)
        assert said < 100, "the other was not tried again"
        return applied(request, unfinished=tries < 3, progress=said)

    assert asks(Script(answer, now), Patience(60, now)).keys() == set(PLACES)


@pytest.mark.parametrize("is_done", [False, True])
def test_what_a_place_failed_with_last_is_told_unless_it_was_done_since(is_done: bool) -> None:
    now = Now()
    patience = Patience(10, now)
    failed = pb.AppliedPartition(error=error_to_wire(NotLeader(broker_id=0, partition="t-0")), progress=3)
    patience.saw(PLACES[0], failed)
    if is_done:
        patience.finished("Prepare", PLACES[0])
    now.seconds = 11
    with pytest.raises(OutOfPatience) as over:
        patience.works("Apply of t-0", "broker 0")
    assert isinstance(over.value.error, NoProgress if is_done else NotLeader)


def test_a_call_that_fails_waits_for_those_beside_it() -> None:
    """They use what its caller is about to give up."""
    asked = Leaders(cast(Cluster, Script(lambda *_: UNREACHABLE, Now())))
    may_end, ended = threading.Event(), threading.Event()

    def call(number: int) -> None:
        if number == 0:
            raise UNREACHABLE
        may_end.wait(30)
        ended.set()

    ends = threading.Timer(0.1, may_end.set)
    ends.start()
    with pytest.raises(BrokerUnreachable):
        asked.each(range(2), call)
    assert ended.is_set()
    join_all([ends], 60)
    asked.close()


@pytest.mark.parametrize("there_are", [0, 1])
def test_without_threads_leaders_are_asked_in_turn_and_a_hint_is_lost(
    monkeypatch: pytest.MonkeyPatch, there_are: int
) -> None:
    script = Script(lambda method, _, request: applied(request) if method == "Apply" else UNREACHABLE, Now())
    asked = Leaders(cast(Cluster, script))
    if there_are:
        asked._threads().submit(int).result(30)
    machine = NoThreads(monkeypatch, lambda name: name.startswith("coordinator"))
    answers = asked.ask(
        "Apply",
        PLACES,
        lambda told: pb.ApplyRequest(partitions=[{"partition": each.partition} for each in told]),
        Patience(10),
        lambda place, error: False,
    )
    assert sorted(answers) == PLACES
    asked.hint("ForgetStaged", PLACES, lambda places: None)

    def call(number: int) -> int:
        done.append(number)
        if number == 1:
            raise UNREACHABLE
        return number

    done: list[int] = []
    with pytest.raises(BrokerUnreachable):
        asked.each([1, 2], call)
    assert sorted(done) == [1, 2]
    assert machine.refused
    asked.close()


def test_a_forked_child_asks_with_threads_of_its_own() -> None:
    asked = Leaders(cast(Cluster, Script(lambda *_: UNREACHABLE, Now())))
    of_the_parent = asked._threads()
    asked._after_fork_in_child()
    assert asked._threads() is not of_the_parent
    of_the_parent.shutdown()
    asked.close()


def test_a_close_ends_the_threads() -> None:
    asked = Leaders(cast(Cluster, Script(lambda *_: UNREACHABLE, Now())))
    begun = threading.Barrier(2)
    asked.each([1, 2], lambda _: begun.wait(30))
    pool = asked._threads()
    assert len(pool._threads) == 2
    asked.close()
    assert not any(thread.is_alive() for thread in pool._threads)
