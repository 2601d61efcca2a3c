"""The cluster as its brokers know it."""

from __future__ import annotations

from broker.replica.host import Host
from kafkalog.wire import broker_pb2 as pb


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
