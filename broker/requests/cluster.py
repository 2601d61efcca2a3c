"""The cluster as its brokers know it, and the change of its format level."""

from __future__ import annotations

from collections.abc import Mapping

from broker.replica.host import Host
from kafkalog.errors import FormatLevelNotRaised, UnreadableZnode
from kafkalog.versions import PROTOCOL
from kafkalog.wire import broker_pb2 as pb
from kafkalog.wire.ranges import versions_to_wire
from kafkalog.zk import paths, registry
from kafkalog.zk.cluster import ClusterRecord, raise_format_level, read_cluster
from kafkalog.zk.controllers import read_controller
from kafkalog.zk.registry import BrokerRecord


def describe_cluster(request: pb.DescribeClusterRequest, host: Host, cluster_id: str) -> pb.ClusterDescription:
    """Every live broker with both its ports, and where ZooKeeper is."""
    address = host.metadata.session.address
    return pb.ClusterDescription(
        cluster_id=cluster_id,
        zookeeper_connect=address.hosts,
        zookeeper_chroot=address.chroot,
        answering_broker_id=host.broker_id,
        protocol=versions_to_wire(PROTOCOL),
        format_level=host.metadata.format_level,
        is_uncertain=not host.metadata.is_certain(),
        brokers=map(_described, host.metadata.brokers.values()),
    )


def _described(broker: BrokerRecord) -> pb.BrokerDescription:
    return pb.BrokerDescription(
        broker_id=broker.broker_id,
        host=broker.host,
        grpc_port=broker.grpc_port,
        data_port=broker.data_port,
        rack=broker.rack,
        epoch=broker.epoch,
        version=broker.version,
        protocol=versions_to_wire(broker.protocol),
        formats=versions_to_wire(broker.formats),
    )


def describe_controller(request: pb.DescribeControllerRequest, host: Host) -> pb.ControllerDescription:
    """The broker that is the controller now. Raises ZooKeeperUnreachable."""
    found = read_controller(host.metadata.session)
    if found is None:
        return pb.ControllerDescription(broker_id=-1)
    return pb.ControllerDescription(broker_id=found.broker_id, controller_epoch=found.epoch)


def upgrade_cluster(request: pb.UpgradeClusterRequest, host: Host) -> pb.UpgradeClusterReply:
    """Raise the cluster's format level.

    Raises:
        FormatLevelNotRaised: it would be lowered, or a registered broker does not understand it.
        UnreadableZnode: of a broker's registration, or of the cluster.
        ZooKeeperUnreachable: whether it was raised is unknown.
    """
    while True:
        before, brokers, registrations = _registered(host)
        level = request.level or max(before.format_level, min(each.formats.newest for each in brokers.values()))
        before.check_not_lowered(level)
        if not request.dry_run and level != before.format_level:
            formats = {number: each.formats for number, each in brokers.items()}
            if not raise_format_level(host.metadata.session, before, level, formats, registrations):
                continue
        hosts = {broker for topic in host.metadata.topics.values() for each in topic.replicas for broker in each}
        return pb.UpgradeClusterReply(
            level_before=before.format_level,
            level=level,
            brokers=map(_described, brokers.values()),
            absent=sorted(hosts - brokers.keys()),
        )


def _registered(host: Host) -> tuple[ClusterRecord, Mapping[int, BrokerRecord], int]:
    """The cluster, its registered brokers, and the version of what counts registrations from before."""
    session = host.metadata.session
    counted = session.exists(paths.BROKER_EPOCHS)
    cluster = read_cluster(session)
    if cluster is None or counted is None:
        raise UnreadableZnode(path=paths.CLUSTER, reason="it was removed; start a broker again, which creates it")
    brokers = registry.live_brokers(session)
    for name in session.children(paths.BROKER_IDS):
        if not name.isdigit() or int(name) not in brokers:
            path = f"{paths.BROKER_IDS}/{name}"
            raise UnreadableZnode(path=path, reason="it is not known what that broker understands")
    if not brokers:
        raise FormatLevelNotRaised(level=cluster.format_level, reason="no broker is registered")
    return cluster, brokers, counted.version
