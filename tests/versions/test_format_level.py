"""What a broker does about a format level that it does not understand, and about one that is raised while it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kafkalog.errors import FormatLevelNotUnderstood
from kafkalog.versions import FORMATS, VersionRange
from kafkalog.zk import paths
from kafkalog.zk.cluster import join_cluster
from kafkalog.zk.session import ZooKeeperSession
from tests.broker.conftest import RunningBroker, StartBroker
from tests.kafkalog.zk.expiry import expire
from tests.waiting import waited_for

TOO_HIGH = FORMATS.newest + 1


def raise_to(broker: RunningBroker, level: int) -> None:
    """As an operator might, by hand, or brokers from which this one was cut off."""
    session = broker.broker.host.metadata.session
    content, _ = session.get(paths.CLUSTER)
    session.set(paths.CLUSTER, json.dumps({**json.loads(content), "format_level": level}).encode())


def test_a_broker_that_does_not_understand_the_level_touches_nothing(
    chroot: str, start_broker: StartBroker, tmp_path: Path
) -> None:
    session = ZooKeeperSession(chroot)
    session.start()
    join_cluster(session, 1, VersionRange(1, TOO_HIGH))
    with pytest.raises(FormatLevelNotUnderstood, match=f"has format level {TOO_HIGH}, and broker 0 understands"):
        start_broker(0)
    assert not (tmp_path / "broker-0" / "meta").exists()
    assert session.children(paths.BROKER_IDS) == []
    session.close()


def test_a_running_broker_learns_of_the_level(start_broker: StartBroker) -> None:
    broker = start_broker(0)
    metadata = broker.broker.host.metadata
    assert metadata.format_level == FORMATS.newest
    raise_to(broker, TOO_HIGH)
    waited_for(lambda: metadata.format_level == TOO_HIGH)
    raise_to(broker, FORMATS.newest)  # restored by hand
    broker.new_topic()  # which the broker has seen after that
    assert metadata.format_level == TOO_HIGH, "bytes of the higher one may have been written"


def test_a_broker_that_was_away_while_the_level_was_raised_is_not_registered_again(
    start_broker: StartBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker = start_broker(0)
    session = broker.broker.host.metadata.session
    raise_to(broker, TOO_HIGH)
    expire(session)
    waited_for(lambda: f"not_followed path={paths.broker(0)}" in caplog.text)
    assert session.children(paths.BROKER_IDS) == []
    assert f"has format level {TOO_HIGH}" in caplog.text
