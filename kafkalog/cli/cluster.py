"""`kafkalog cluster ...`: the cluster's brokers and how much they hold, and its format level."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from kafkalog.cli.command import CommandGroup, bootstrap_option, json_option
from kafkalog.cli.extents import is_under_replicated, totals, why_unserved
from kafkalog.cli.output import admin_of, counted, print_json, print_table
from kafkalog.errors import RetriableError
from kafkalog.records import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kafkalog.client.admin import Admin, ClusterUpgrade


@click.group(cls=CommandGroup)
def cluster() -> None:
    """Describe the cluster, and raise its format level after an upgrade."""


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
    """Describe the cluster: its brokers, how much it holds, and which partitions cannot be read or written; the totals
    are without these. One of the brokers is the controller, which elects the leaders of partitions."""
    with admin_of(bootstrap) as admin:
        found = _description(admin)
    if as_json:
        print_json(found)
        return
    click.echo(
        f"cluster {found['cluster_id']}, format level {found['format_level']}, ZooKeeper {found['zookeeper']}, "
        f"client {found['client_version']}"
    )
    least = "at least " if found["uncounted_partitions"] else ""
    click.echo(
        f"{counted(found['topics'], 'topic')}, {counted(found['partitions'], 'partition')}, "
        f"{least}{counted(found['records'], 'record')}, {least}{counted(found['size_bytes'], 'byte')}"
    )
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


@cluster.command(
    "upgrade",
    examples=[
        ("What it would do, and which brokers hold it back", "kafkalog cluster upgrade --dry-run"),
        ("After every broker runs the new version", "kafkalog cluster upgrade"),
    ],
)
@click.option(
    "--level",
    type=click.IntRange(1),
    help="The format level; default: the highest that all registered brokers understand.",
)
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be changed, and what holds it back.")
@bootstrap_option
@json_option
def upgrade(level: int | None, dry_run: bool, bootstrap: str, as_json: bool) -> None:
    """Raise the cluster's format level: what may be written to disks and to ZooKeeper.

    Upgrade every broker first, one after the other; brokers of the old and the new version work together until then.
    After the level was raised, brokers of the old version do not start any more. The level cannot be lowered.
    """
    with admin_of(bootstrap) as admin:
        found = admin.upgrade_cluster(level, dry_run=dry_run)
    if as_json:
        print_json(
            {
                "level_before": found.level_before,
                "level": found.level,
                "dry_run": dry_run,
                "brokers": [
                    {"broker": each.broker_id, "version": each.version, "format_levels": list(each.formats)}
                    for each in found.brokers
                ],
                "held_back_by": [each.broker_id for each in found.behind],
                "absent": list(found.absent),
            }
        )
        return
    for sentence in _sentences(found, dry_run):
        click.echo(sentence)


def _sentences(found: ClusterUpgrade, dry_run: bool) -> Iterator[str]:
    if found.level == found.level_before:
        yield f"the format level stays {found.level}"
    else:
        yield f"the format level {'would be' if dry_run else 'is'} {found.level}; it was {found.level_before}"
    for broker in found.behind:
        yield f"broker {broker.broker_id} ({broker.version}) holds it back: it understands {broker.formats}"
    if found.absent and (dry_run or found.level > found.level_before):
        listed = ", ".join(map(str, found.absent))
        yield f"not running: broker {listed}; if it does not understand level {found.level}, it will not start any more"


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
    records, size_bytes, uncounted = totals(extents, leaders)
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
        "format_level": described.format_level,
        "controller": controller,
        "brokers": [
            {
                "broker": broker.broker_id,
                "address": f"{broker.host}:{broker.grpc_port}",
                "data_port": broker.data_port,
                "rack": broker.rack,
                "version": broker.version,
                "format_levels": list(broker.formats),
                "leads": leads[broker.broker_id],
            }
            for broker in described.brokers
        ],
        "topics": len(topics),
        "partitions": len(leaders),
        "under_replicated": sum(is_under_replicated(partition, live) for partition in partitions),
        "offline": sum(partition.is_offline(live) for partition in partitions),
        "records": records,
        "size_bytes": size_bytes,
        "uncounted_partitions": uncounted,
        "unserved": unserved,
        "damaged": damaged,
    }
