"""The cluster as its brokers know it."""

from __future__ import annotations

from broker.replica.host import Host
from kafkalog.wire import broker_pb2 as pb
from kafkalog.zk.controllers import read_controller


def describe_cluster(request: pb.DescribeClusterRequest, host: Host, cluster_id: str) -> pb.ClusterDescription:
    """Every live broker with both its ports, and where ZooKeeper is."""
    address = host.metadata.session.address
    reply = pb.ClusterDescription(
        cluster_id=cluster_id,
        zookeeper_connect=address.hosts,
        zookeeper_chroot=address.chroot,
        answering_broker_id=host.broker_id,
    )
    for broker in host.metadata.brokers.values():
        reply.brokers.add(
            broker_id=broker.broker_id,
            host=broker.host,
            grpc_port=broker.grpc_port,
            data_port=broker.data_port,
            rack=broker.rack,
            epoch=broker.epoch,
            version=broker.version,
        )
    return reply


def describe_controller(request: pb.DescribeControllerRequest, host: Host) -> pb.ControllerDescription:
    """The broker that is the controller now. Raises ZooKeeperUnreachable."""
    found = read_controller(host.metadata.session)
    if found is None:
        return pb.ControllerDescription(broker_id=-1)
    return pb.ControllerDescription(broker_id=found.broker_id, controller_epoch=found.epoch)
