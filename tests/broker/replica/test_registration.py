"""When a broker is put on the list and when it is not, without ZooKeeper; with it, it is in `test_host.py`."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.config import BrokerSettings
from broker.replica.metadata import Metadata
from broker.replica.registration import Registration
from broker.replica.undone import Undone
from broker.storage.disk_errors import DirectoryHealth
from kafkalog.clock import ManualClock
from kafkalog.errors import InvalidSetting
from kafkalog.zk import registry
from kafkalog.zk.registry import BrokerRecord

MINE, OTHER = (BrokerRecord(0, "here", 1, 2, directory=directory) for directory in ("mine", "other"))
SESSION_SECONDS = 10


class NoWaits(threading.Condition):
    """One on which nobody waits for the time to pass."""

    def wait(self, timeout: float | None = None) -> bool:
        return False


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def metadata() -> Metadata:
    session: Any = SimpleNamespace(patient=contextlib.nullcontext)
    made = Metadata(session)
    made.changed = NoWaits()
    made._brokers = {0: MINE}
    return made


@pytest.fixture
def registration(metadata: Metadata, clock: ManualClock) -> Registration:
    settings = BrokerSettings.parse({"zookeeper.session.timeout.ms": SESSION_SECONDS * 1000})
    return Registration(MINE, metadata, DirectoryHealth(Path("/data"), clock), settings, clock)


@pytest.mark.parametrize(("looks", "is_free"), [(3, True), (100, False)])
def test_an_id_is_waited_for_as_long_as_the_session_of_a_dead_broker_lasts(
    registration: Registration, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, looks: int, is_free: bool
) -> None:
    seconds: list[float] = []
    began = clock.monotonic()

    def other_broker(*_: object) -> BrokerRecord | None:
        seconds.append(clock.monotonic() - began)
        clock.advance(4)
        return OTHER if len(seconds) < looks else None

    monkeypatch.setattr(registry, "other_broker", other_broker)
    with contextlib.nullcontext() if is_free else pytest.raises(InvalidSetting, match="has this id"):
        registration.check_id()
    assert seconds == ([0, 4, 8] if is_free else [0, 4, 8, 12])


def test_a_broker_that_is_withdrawn_while_it_registers_is_taken_off_the_list(
    registration: Registration, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def register_broker(*_: object) -> None:
        registration.withdraw()
        done.append("registered")

    monkeypatch.setattr(registry, "register_broker", register_broker)
    monkeypatch.setattr(registry, "withdraw_broker", lambda *_: done.append("withdrawn"))
    registration.register()
    assert done == ["withdrawn", "registered", "withdrawn"], "the entry may be written later"


def test_a_session_that_is_lost_before_the_broker_serves_puts_it_on_no_list(
    registration: Registration, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[BrokerRecord] = []
    monkeypatch.setattr(registry, "register_broker", lambda _, record: registered.append(record))
    registration.session_lost()
    assert registration.take_due() and not registration.is_due
    registration.renew(Undone(clock))
    assert registered == []
    registration.register()
    registration.renew(Undone(clock))
    assert registered == [MINE, MINE]


def test_a_broker_whose_id_another_one_has_gives_it_up_and_raises_no_epoch(
    registration: Registration, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders: list[BrokerRecord | None] = [None]
    for name in ("register_broker", "other_broker", "raise_broker_epoch"):
        monkeypatch.setattr(registry, name, lambda *_: holders[0])
    undone, registration._metadata._brokers = Undone(clock), {0: replace(MINE, epoch=7)}
    registration.register()
    registration.renew(undone)
    registration.check_held()
    registration.raise_epoch()
    holders[0] = OTHER
    with pytest.raises(InvalidSetting, match="has this id"):
        registration.raise_epoch()
    assert (registration.taken, registration.epoch) == (None, 7)
    for call in (registration.check_held, lambda: registration.renew(undone)):
        with pytest.raises(InvalidSetting, match="has this id") as caught:
            call()
        assert registration.taken is caught.value
    assert registration.epoch == 0
    assert undone.reasons == {}, "it is not tried again"


def test_the_epoch_is_that_of_its_own_registration(registration: Registration, metadata: Metadata) -> None:
    found: list[int] = []
    for brokers in ({0: replace(MINE, epoch=7)}, {0: replace(OTHER, epoch=8)}, {1: replace(MINE, epoch=9)}):
        metadata._brokers = brokers
        found.append(registration.epoch)
    assert found == [7, 0, 0]
