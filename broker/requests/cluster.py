"""The cluster and this broker: who is there, and what this one is doing."""

from __future__ import annotations

from broker.replica.catalog import Catalog
from kafkalog.wire import broker_pb2 as pb


def describe_cluster(request: pb.DescribeClusterRequest, catalog: Catalog, cluster_id: str) -> pb.ClusterDescription:
    """Every live broker with both its ports, and where ZooKeeper is."""
    address = catalog.session.address
    reply = pb.ClusterDescription(
        cluster_id=cluster_id,
        zookeeper_connect=address.hosts,
        zookeeper_chroot=address.chroot,
        answering_broker_id=catalog.broker_id,
    )
    for broker in catalog.brokers.values():
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
