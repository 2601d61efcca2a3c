"""`kafkalog cluster describe`: the cluster's brokers, and how much they hold."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from kafkalog.cli.command import CommandGroup, bootstrap_option, json_option
from kafkalog.cli.extents import totals, why_unserved
from kafkalog.cli.output import admin_of, counted, print_json, print_table
from kafkalog.errors import RetriableError
from kafkalog.records import TopicPartition

if TYPE_CHECKING:
    from kafkalog.client.admin import Admin


@click.group(cls=CommandGroup)
def cluster() -> None:
    """Describe the cluster."""


@cluster.command(
    "describe",
    examples=[
        ("Brokers, and partitions that are not served", "kafkalog cluster describe"),
        ("For a program", "kafkalog cluster describe --json --bootstrap broker-1.example.org:9192"),
    ],
)
@bootstrap_option
@json_option
def describe(bootstrap: str, as_json: bool) -> None:
    """Describe the cluster: its brokers, how much it holds, and which partitions cannot be read or written. One of the
    brokers is the controller, which elects the leaders of partitions."""
    with admin_of(bootstrap) as admin:
        found = _description(admin)
    if as_json:
        print_json(found)
        return
    click.echo(f"cluster {found['cluster_id']}, ZooKeeper {found['zookeeper']}, client {found['client_version']}")
    counts = [counted(found[f"{name}s"], name) for name in ("topic", "partition", "record")]
    click.echo(f"{', '.join(counts)}, {counted(found['size_bytes'], 'byte')}")
    controller = "nobody, or unknown" if found["controller"] is None else f"broker {found['controller']}"
    lacking = f"{counted(found['under_replicated'], 'under-replicated partition')}, {found['offline']} without a leader"
    click.echo(f"controller: {controller}; {lacking}\n")
    print_table(found["brokers"], ["broker", "address", "data_port", "rack", "version", "leads"])
    if found["unserved"]:
        click.echo(f"\n{counted(len(found['unserved']), 'partition')} not served:")
        for each in found["unserved"]:
            click.echo(f"  {each['topic']}-{each['partition']}: {each['error']}")
    if found["damaged"]:
        click.echo(f"\n{counted(len(found['damaged']), 'damaged range')}:")
        for each in found["damaged"]:
            where = f"{each['topic']}-{each['partition']} on broker {each['broker']}"
            reason = each["reason"] or "to be repaired"
            click.echo(f"  {where}: offsets {each['start_offset']} to {each['end_offset'] - 1}: {reason}")


def _description(admin: Admin) -> dict[str, Any]:
    from kafkalog import __version__

    described = admin.describe_cluster()
    topics = admin.topics()
    extents = admin.extents()
    leaders = {
        TopicPartition(topic.name, partition.partition): partition.leader
        for topic in topics
        for partition in topic.partitions
    }
    leads = Counter(leaders.values())
    live = {broker.broker_id for broker in described.brokers}
    partitions = [partition for topic in topics for partition in topic.partitions]
    try:
        controller = admin.describe_controller()
    except RetriableError:  # the brokers know all else without ZooKeeper
        controller = None
    unserved = []
    for partition, leader in leaders.items():
        error = why_unserved(extents.get(partition), leader, live)
        if error is not None:
            unserved.append({"topic": partition.topic, "partition": partition.partition, "error": str(error)})
    records, size_bytes, _ = totals(extents, leaders)
    damaged = [
        {
            "broker": broker_id,
            "topic": each.topic,
            "partition": each.partition,
            "start_offset": each.start_offset,
            "end_offset": each.end_offset,
            "reason": each.reason,
        }
        for broker_id, status in admin.describe_brokers().items()
        for each in status.damaged
    ]
    return {
        "cluster_id": described.cluster_id,
        "zookeeper": f"{described.zookeeper_connect}{described.zookeeper_chroot}",
        "client_version": __version__,
        "controller": controller,
        "brokers": [
            {
                "broker": broker.broker_id,
                "address": f"{broker.host}:{broker.grpc_port}",
                "data_port": broker.data_port,
                "rack": broker.rack,
                "version": broker.version,
                "leads": leads[broker.broker_id],
            }
            for broker in described.brokers
        ],
        "topics": len(topics),
        "partitions": len(leaders),
        "under_replicated": sum(partition.is_under_replicated for partition in partitions),
        "offline": sum(partition.is_offline(live) for partition in partitions),
        "records": records,
        "size_bytes": size_bytes,
        "unserved": unserved,
        "damaged": damaged,
    }
