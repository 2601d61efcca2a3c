"""The cluster's format level in ZooKeeper: who may register, and when it may be raised."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import pytest

from kafkalog.errors import FormatLevelNotRaised, FormatLevelNotUnderstood
from kafkalog.versions import FIRST, FORMATS, VersionRange
from kafkalog.zk import paths, registry
from kafkalog.zk.cluster import ClusterRecord, join_cluster, raise_format_level, read_cluster
from kafkalog.zk.registry import BrokerRecord
from kafkalog.zk.session import ZooKeeperSession
from tests.between import ahead
from tests.waiting import waited_for

BOTH = VersionRange(1, 2)


@pytest.fixture
def old(session: ZooKeeperSession) -> ZooKeeperSession:
    """The session of a broker that understands level 1, which has made the cluster."""
    assert join_cluster(session, 5, VersionRange(1, 1)).format_level == 1
    return session


def record(broker_id: int, formats: VersionRange) -> BrokerRecord:
    return BrokerRecord(broker_id, "h", 1, 2, directory=f"disk-{broker_id}", formats=formats)


def counted(session: ZooKeeperSession) -> int:
    stat = session.exists(paths.BROKER_EPOCHS)
    assert stat is not None
    return stat.version


def cluster_in(session: ZooKeeperSession) -> ClusterRecord:
    found = read_cluster(session)
    assert found is not None
    return found


def raised(session: ZooKeeperSession, level: int, formats: Mapping[int, VersionRange]) -> bool:
    return raise_format_level(session, cluster_in(session), level, formats, counted(session))


def test_the_first_broker_gives_a_cluster_the_newest_level_that_it_understands(session: ZooKeeperSession) -> None:
    assert join_cluster(session, 5, BOTH).format_level == 2
    assert join_cluster(session, 6, FORMATS).format_level == 2, "another one takes what is there"


def test_a_cluster_from_before_there_were_levels_has_the_first_one(session: ZooKeeperSession) -> None:
    session.create(paths.CLUSTER, b'{"cluster_id":"c","created_us":5}')
    assert join_cluster(session, 6, BOTH) == ClusterRecord("c", 5, FIRST)


def test_the_level_is_raised_once_all_registered_brokers_understand_it(old: ZooKeeperSession) -> None:
    with pytest.raises(FormatLevelNotRaised) as behind:
        raised(old, 2, {0: BOTH, 1: VersionRange(1, 1)})
    assert str(behind.value) == (
        "the cluster's format level stays 1: broker 1 understands 1; upgrade it before you raise the level to 2"
    )
    assert cluster_in(old).format_level == 1
    assert raised(old, 2, {0: BOTH, 1: BOTH})
    assert cluster_in(old).format_level == 2
    with pytest.raises(FormatLevelNotRaised, match="cannot be lowered to 1"):
        raised(old, 1, {0: BOTH, 1: BOTH})


def test_fields_of_a_newer_version_stay_when_the_level_is_raised(old: ZooKeeperSession) -> None:
    content, _ = old.get(paths.CLUSTER)
    old.set(paths.CLUSTER, json.dumps({**json.loads(content), "newer": [1]}).encode())
    assert raised(old, 2, {})
    content, _ = old.get(paths.CLUSTER)
    assert json.loads(content) == {
        "cluster_id": cluster_in(old).cluster_id, "created_us": 5, "format_level": 2, "newer": [1]
    }  # fmt: skip


def test_a_broker_registers_while_it_understands_the_level(
    old: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    assert registry.register_broker(new_session(), record(1, VersionRange(1, 1))) is None
    assert registry.live_brokers(old)[1].formats == (1, 1)
    assert raised(old, 2, {})
    with pytest.raises(FormatLevelNotUnderstood) as refused:
        registry.register_broker(new_session(), record(2, VersionRange(1, 1)))
    assert str(refused.value) == (
        "the cluster has format level 2, and broker 2 understands 1: "
        "start a version of the broker that understands level 2"
    )
    assert registry.register_broker(new_session(), record(2, BOTH)) is None


def test_a_level_raised_amid_a_registration_refuses_it(
    old: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_session()
    ahead(monkeypatch, other, "multi", lambda: raised(old, 2, {}))
    with pytest.raises(FormatLevelNotUnderstood):
        registry.register_broker(other, record(1, VersionRange(1, 1)))
    assert registry.live_brokers(old) == {}


def test_a_registration_amid_a_raise_refuses_the_raise(
    old: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = new_session()
    registry.register_broker(new_session(), record(0, BOTH))
    before, registrations = cluster_in(old), counted(old)
    registry.register_broker(other, record(1, VersionRange(1, 1)))
    assert not raise_format_level(old, before, 2, {0: BOTH}, registrations)
    assert cluster_in(old).format_level == 1


def test_what_a_newer_broker_added_to_its_epoch_stays(
    old: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    old.create(paths.broker_epoch(1), b'{"directory":"disk-1","where":"there","newer":7}')
    registry.register_broker(new_session(), record(1, BOTH))
    content, stat = old.get(paths.broker_epoch(1))
    assert json.loads(content) == {"directory": "disk-1", "where": "", "newer": 7}
    registry.raise_broker_epoch(old, record(1, BOTH))
    content, stat = old.get(paths.broker_epoch(1))
    assert (json.loads(content)["newer"], stat.version) == (7, 2)


def test_a_watch_reports_that_the_level_was_raised(
    old: ZooKeeperSession, new_session: Callable[[], ZooKeeperSession]
) -> None:
    changed: list[str] = []
    watching = new_session()
    read_cluster(watching, changed.append)
    assert raised(old, 2, {})
    assert cluster_in(watching).format_level == 2
    waited_for(lambda: changed == [paths.CLUSTER])
