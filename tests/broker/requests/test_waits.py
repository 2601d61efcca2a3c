"""Waiting at real partitions, without a port: what wakes, what is seen, and that nobody stays registered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from broker.requests.waits import Waiter, enough, hosted, wait_for
from broker.storage.log_dir import LogDirectory
from kafkalog.clock import SYSTEM_CLOCK
from kafkalog.wire import dataport_pb2 as pb
from tests.broker.data_port_client import a_batch
from tests.broker.requests.hosted import TOPIC_ID, Hosted
from tests.waiting import waited_for
from tests.whole_batch import check_batch


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Hosted]:
    directory = LogDirectory(tmp_path / "data")
    yield Hosted(directory)
    directory.close()


def append(host: Hosted, number: int = 0) -> None:
    data = memoryview(bytearray(a_batch()))
    host.partitions[number].append_as_leader([(check_batch(data), data)])


def test_a_waiter_is_woken_once_where_it_waits_and_not_where_it_waited_before(host: Hosted) -> None:
    woken: list[str] = []
    waiter = Waiter(lambda: woken.append("woken"))
    first, second = host.partitions
    assert waiter.look([first], lambda: "seen") == "seen"
    waiter.look([second], list)
    append(host, 0)
    assert not woken
    append(host, 1)
    append(host, 1)
    assert woken == ["woken"]
    waiter.look([first, second], list)
    waiter.leave()
    append(host, 0)
    assert woken == ["woken"] and not waiter.partitions
    assert [len(each.waiters) for each in host.partitions] == [0, 0]


def test_an_event_during_registration_is_seen(host: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = host.partitions[0]
    register = partition.waiters.register

    def append_and_register(wake: Callable[[], None]) -> None:
        append(host)
        register(wake)

    monkeypatch.setattr(partition.waiters, "register", append_and_register)
    assert Waiter(lambda: None).look([partition], lambda: partition.end_offset) == 1


def test_a_wait_ends_with_what_is_found_with_the_time_and_with_who_gives_up(host: Hosted) -> None:
    partition = host.partitions[0]
    found: list[int] = []
    waiting = threading.Thread(
        target=lambda: found.append(
            wait_for(host.partitions, lambda: partition.end_offset, time.monotonic() + 60, SYSTEM_CLOCK)
        )
    )
    waiting.start()
    waited_for(lambda: len(partition.waiters) == 1)
    append(host)
    waiting.join(30)
    assert found == [1]
    assert wait_for([partition], lambda: 0, time.monotonic(), SYSTEM_CLOCK) == 0
    assert wait_for([partition], lambda: 0, time.monotonic() + 60, SYSTEM_CLOCK, None, lambda: False) == 0
    with pytest.raises(ZeroDivisionError):
        wait_for([partition], lambda: 1 // 0, time.monotonic() + 60, SYSTEM_CLOCK)
    assert [len(each.waiters) for each in host.partitions] == [0, 0]


def test_a_fetch_waits_for_its_bytes_at_the_partitions_that_are_led_here(host: Hosted) -> None:
    parts = [pb.FetchPartition(topic_id=topic_id, partition=1) for topic_id in (bytes(16), TOPIC_ID)]
    assert hosted(pb.FetchRequest(partitions=parts), host) == [host.partitions[1]]  # type: ignore[arg-type]
    append(host, 1)
    length = host.partitions[1].size_bytes
    for min_bytes, is_enough in ((length, True), (length + 1, False)):
        answer = enough(pb.FetchRequest(partitions=parts[1:], min_bytes=min_bytes), host, 1 << 20)  # type: ignore[arg-type]
        assert (answer is not None) is is_enough
        if answer is not None:
            assert answer.length == length
            answer.close()


def test_what_comes_while_it_is_looked_for_is_not_waited_for(host: Hosted) -> None:
    class Woken(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert self.is_set(), "the wake-up was forgotten"
            return True

    found: list[int] = []

    def look() -> bool:
        found.append(host.partitions[0].end_offset)
        if len(found) == 1:
            append(host)  # just behind the look
        return len(found) > 1

    assert wait_for(host.partitions, look, time.monotonic() + 60, SYSTEM_CLOCK, Woken())
    assert found == [0, 1]


def test_an_answer_that_is_not_enough_holds_no_file(monkeypatch: pytest.MonkeyPatch, host: Hosted) -> None:
    closed: list[bool] = []
    answer = SimpleNamespace(is_enough=lambda request: False, close=lambda: closed.append(True))
    monkeypatch.setattr("broker.requests.waits.fetch", lambda *_: answer)
    assert enough(pb.FetchRequest(), host, 1) is None  # type: ignore[arg-type]
    assert closed == [True]
