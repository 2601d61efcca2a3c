"""`kafkalog topics ...` and `kafkalog offsets`: show and change topics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from kafkalog.cli.command import Command, CommandGroup, bootstrap_option, confirm, json_option, not_empty, pairs, rate
from kafkalog.cli.extents import extent_rows, is_under_replicated, not_live, totals
from kafkalog.cli.output import (
    admin_of,
    counted,
    end_with,
    named_brokers,
    print_json,
    print_none,
    print_rows,
    print_table,
    progress,
)
from kafkalog.cli.reassign import reassign
from kafkalog.errors import KafkalogError, PartitionLost, TopicExists, UnknownSetting, UnknownTopic
from kafkalog.records import TopicPartition

if TYPE_CHECKING:
    from kafkalog.client.admin import Admin, PartitionExtent, TopicDescription
    from kafkalog.client.cluster import PartitionInfo
    from kafkalog.client.verification import ReplicaFault, VerifiedPartition

_NO_TOPICS = "there are no topics"
_FACTOR = "replication.factor"
"""No setting of a topic: what people take for one."""
_PARTITION_COLUMNS = [
    "partition", "leader", "leader_epoch", "replicas", "isr", "start_offset", "end_offset", "size_bytes"
]  # fmt: skip


@click.group(cls=CommandGroup)
def topics() -> None:
    """Create, list, describe, alter, move, recover and delete topics."""


@topics.command(
    "create",
    examples=[
        ("With the broker's number of partitions", "kafkalog topics create flights"),
        (
            "Kept for a day, synced every second",
            "kafkalog topics create flights --partitions 4 --config retention.ms=86400000 --config flush.ms=1000",
        ),
        (
            "Three copies, of which two must have a record before its ack",
            "kafkalog topics create flights --replication-factor 3 --config min.insync.replicas=2",
        ),
    ],
)
@click.argument("topic")
@click.option(
    "--partitions", type=click.IntRange(1), help="Number of partitions; default: the broker's num.partitions."
)
@click.option(
    "--replication-factor",
    type=click.IntRange(1),
    help="Copies of each partition, each on another broker; default: the broker's default.replication.factor.",
)
@click.option("--config", multiple=True, metavar="NAME=VALUE", callback=pairs, help="A topic setting; repeatable.")
@click.option("--if-not-exists", is_flag=True, help="Do nothing if the topic exists.")
@bootstrap_option
@json_option
def create(
    topic: str,
    partitions: int | None,
    replication_factor: int | None,
    config: dict[str, str],
    if_not_exists: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Create TOPIC."""
    with admin_of(bootstrap) as admin:
        try:
            made = admin.create_topic(topic, partitions, replication_factor, config)
        except UnknownSetting as error:
            if error.facts["name"] == _FACTOR:
                error.add_note("give it as --replication-factor")
            raise
        except TopicExists:
            if not if_not_exists:
                raise
            if as_json:
                print_json({**_changed(*admin.describe_topics([topic])), "created": False})
            else:
                click.echo(f"topic {topic} exists already")
            return
    copies = len(made.partitions[0].replicas)
    if as_json:
        print_json({**_changed(made), "created": True})
    else:
        of_each = f", {copies} copies of each" if copies > 1 else ""
        click.echo(f"created topic {made.name} with {_partitions_of(made)}{of_each}")
    _warn_of(made.behind, "the new topic")


@topics.command(
    "list",
    examples=[
        ("A table", "kafkalog topics list"),
        ("The names alone", "kafkalog topics list --json | jq -r .[].topic"),
        ("The partitions with a replica that is not in sync", "kafkalog topics list --under-replicated"),
    ],
)
@click.option(
    "--under-replicated",
    is_flag=True,
    help="List the partitions with a replica that is not in sync, or whose broker is not registered; fail (exit code "
    "1) if there is one, or if that is not known.",
)
@click.option(
    "--offline",
    is_flag=True,
    help="List the partitions that no live broker leads; fail (exit code 1) if there is one, or if that is not known.",
)
@bootstrap_option
@json_option
def list_topics(under_replicated: bool, offline: bool, bootstrap: str, as_json: bool) -> None:
    """List the topics: partitions, records and bytes of each. Partitions that are not served are counted separately."""
    if under_replicated and offline:
        raise click.UsageError("give --under-replicated or --offline, not both")
    with admin_of(bootstrap) as admin:
        if under_replicated or offline:
            state = "offline" if offline else "under-replicated"
            live, listed = _certain(admin, state)
            found = [
                {"topic": topic.name, **_replication(each), "not_live": not_live(each.replicas, live)}
                for topic in listed
                for each in topic.partitions
                if (each.is_offline(live) if offline else is_under_replicated(each, live))
            ]
            columns = ["topic", "partition", "leader", "replicas", "not_live", "isr", "eligible"]
            print_rows(found, columns, as_json, f"no partition is {state}")
            if found:
                is_state = f"{'is' if len(found) == 1 else 'are'} {state}"
                raise KafkalogError(reason=f"{counted(len(found), 'partition')} {is_state}")
            return
        listed = admin.topics()
        extents = admin.extents()
    rows = []
    for topic in listed:
        records, size_bytes, unserved = totals(extents, _all_of(topic))
        row = {"topic": topic.name, "partitions": len(topic.partitions), "records": records, "size_bytes": size_bytes}
        rows.append(row | {"unserved": unserved})
    columns = ["topic", "partitions", "records", "size_bytes"]
    print_rows(rows, [*columns, *(["unserved"] if any(row["unserved"] for row in rows) else [])], as_json, _NO_TOPICS)


@topics.command(
    "describe",
    examples=[
        ("One topic", "kafkalog topics describe flights"),
        ("All of them, for a program", "kafkalog topics describe --json"),
    ],
)
@click.argument("names", nargs=-1, metavar="[TOPIC]...")
@bootstrap_option
@json_option
def describe(names: tuple[str, ...], bootstrap: str, as_json: bool) -> None:
    """Describe TOPICs, or all topics if none is named: partitions with leader, replicas, in-sync replicas and size, and
    settings, both those set for the topic and the defaults."""
    with admin_of(bootstrap) as admin:
        listed = admin.describe_topics(list(names) or None)
        extents = admin.extents([topic.name for topic in listed])
    found = [_description(topic, extents) for topic in listed]
    if as_json:
        print_json(found)
        return
    if not found:
        print_none(_NO_TOPICS)
    for number, topic in enumerate(found):
        click.echo("\n" * (number > 0) + f"{topic['topic']}  id {topic['topic_id']}")
        is_moved = any(each["adding"] or each["removing"] for each in topic["partitions"])
        columns = [*_PARTITION_COLUMNS[:4], *(("adding", "removing") if is_moved else ()), *_PARTITION_COLUMNS[4:]]
        print_table(topic["partitions"], columns, spare=("leader_epoch", "start_offset", "size_bytes"))
        for partition in topic["partitions"]:
            if partition["error"]:
                click.echo(f"  {partition['error']}")
        settings = [
            {"setting": name, "value": value, "from": "the topic" if name in topic["config"] else "the default"}
            for name, value in topic["effective"].items()
        ]
        click.echo()
        print_table(settings, ["setting", "value", "from"])


def _certain(admin: Admin, state: str) -> tuple[set[int], list[TopicDescription]]:
    """The live brokers, and all topics. Scripts stop the next broker if nothing is wrong with these.

    Raises:
        KafkalogError: they may be those from before a connection to ZooKeeper was lost.
    """
    before = admin.describe_cluster()
    listed = admin.topics()
    # Again, since the topics may be from another broker, which was cut off long ago.
    if before.is_uncertain or admin.describe_cluster().is_uncertain:
        reason = f"which partitions are {state} is not known: no broker that answers has a connection to ZooKeeper"
        raise KafkalogError(reason=f"{reason} ({before.zookeeper_connect})")
    return {broker.broker_id for broker in before.brokers}, listed


def _partitions_of(topic: TopicDescription) -> str:
    """A topic's number of partitions, and how many of them cannot be used yet."""
    unopened = sum(not partition.has_leader for partition in topic.partitions)
    said = counted(len(topic.partitions), "partition")
    return said if not unopened else f"{said} ({unopened} not open yet; clients ask again for a while)"


def _warn_of(behind: Sequence[int], what: str) -> None:
    """Warn of the brokers that have not read a change from ZooKeeper.

    Args:
        what: "the new topic", "the change".
    """
    if behind:
        have = f"{named_brokers(behind)} {'has' if len(behind) == 1 else 'have'}"
        click.echo(f"warning: {have} not read {what} from ZooKeeper yet: it takes effect there later", err=True)


def _all_of(topic: TopicDescription) -> list[TopicPartition]:
    return [TopicPartition(topic.name, partition.partition) for partition in topic.partitions]


def _replication(partition: PartitionInfo) -> dict[str, Any]:
    return {
        "partition": partition.partition,
        "leader": partition.leader if partition.has_leader else None,
        "leader_epoch": partition.leader_epoch,
        "replicas": list(partition.replicas),
        "isr": list(partition.isr),
        "eligible": list(partition.eligible),
        "adding": list(partition.adding),
        "removing": list(partition.removing),
    }


def _description(
    topic: TopicDescription, extents: Mapping[TopicPartition, PartitionExtent | KafkalogError]
) -> dict[str, Any]:
    def partition(each: PartitionInfo) -> dict[str, Any]:
        found = extents.get(TopicPartition(topic.name, each.partition))
        extent = None if isinstance(found, KafkalogError) else found
        return {
            **_replication(each),
            "start_offset": None if extent is None else extent.start_offset,
            "end_offset": None if extent is None else extent.end_offset,
            "size_bytes": None if extent is None else extent.size_bytes,
            "error": str(found) if isinstance(found, KafkalogError) else None,
        }

    return {**_settings(topic), "partitions": [partition(each) for each in topic.partitions]}


def _changed(topic: TopicDescription) -> dict[str, Any]:
    """A topic that was created or altered, as JSON."""
    partitions = [_replication(each) for each in topic.partitions]
    return {**_settings(topic), "partitions": partitions, "behind": list(topic.behind)}


def _settings(topic: TopicDescription) -> dict[str, Any]:
    return {
        "topic": topic.name,
        "topic_id": topic.topic_id.hex(),
        "config": dict(sorted(topic.config.items())),
        "effective": dict(sorted(topic.effective.items())),
    }


@topics.command(
    "alter",
    examples=[
        ("Keep records for a day", "kafkalog topics alter flights --set retention.ms=86400000"),
        (
            "For the default time, in more partitions",
            "kafkalog topics alter flights --unset retention.ms --partitions 8",
        ),
    ],
)
@click.argument("topic")
@click.option(
    "--set", "changes", multiple=True, metavar="NAME=VALUE", callback=pairs, help="Set a topic setting; repeatable."
)
@click.option("--unset", multiple=True, metavar="NAME", help="Reset a setting to its default; repeatable.")
@click.option("--partitions", type=click.IntRange(1), help="New number of partitions; not fewer than now.")
@bootstrap_option
@json_option
def alter(
    topic: str,
    changes: dict[str, str],
    unset: tuple[str, ...],
    partitions: int | None,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Change settings of TOPIC, or add partitions."""
    if not (changes or unset or partitions):
        raise click.UsageError("nothing to change: give --set, --unset or --partitions")
    with admin_of(bootstrap) as admin:
        try:
            altered = admin.alter_topic(topic, set=changes, unset=list(unset), partitions=partitions)
        except UnknownSetting as error:
            if error.facts["name"] == _FACTOR:
                error.add_note(
                    f"`kafkalog topics reassign {topic} --replication-factor N` changes the number of copies"
                )
            raise
    if as_json:
        print_json(_changed(altered))
    else:
        settings = " ".join(f"{name}={value}" for name, value in sorted(altered.config.items())) or "all defaults"
        click.echo(f"topic {altered.name} has {_partitions_of(altered)}, {settings}")
    _warn_of(altered.behind, "the change")


@topics.command(
    "recover",
    examples=[
        ("List the lost partitions", "kafkalog topics recover flights"),
        ("Accept the loss of one", "kafkalog topics recover flights --partition 1 --accept-loss"),
    ],
)
@click.argument("topic")
@click.option("--partition", "partitions", type=click.IntRange(0), multiple=True, help="Only this one; repeatable.")
@click.option("--start-offset", type=click.IntRange(0), metavar="N",
              help="Offset of the first new record; default: ten million after the highest offset that a group has "
              "committed.")  # fmt: skip
@click.option(
    "--accept-loss",
    is_flag=True,
    help="Accept the loss of their records; without this option, only list the lost partitions.",
)
@bootstrap_option
def recover(
    topic: str, partitions: tuple[int, ...], start_offset: int | None, accept_loss: bool, bootstrap: str
) -> None:
    """Restart lost partitions of TOPIC with an empty log. Their records are lost for good."""
    with admin_of(bootstrap) as admin:
        [description] = admin.describe_topics([topic])
        for number in partitions:
            description.partition(number)  # UnknownPartition
        lost = [
            error
            for (_, number), error in admin.unserved([topic]).items()
            if isinstance(error, PartitionLost) and (not partitions or number in partitions)
        ]
        if not accept_loss:
            for error in lost:
                click.echo(str(error))
            if not lost:
                print_none(f"{'none of these partitions' if partitions else 'no partition'} of {topic} is lost")
            return
        begun = admin.recover_partitions(topic, partitions or None, start_offset)
    for partition, offset in begun.items():
        click.echo(f"{partition} begins anew at offset {offset}; what it held is lost")
    if not begun:
        print_none(f"no partition of {topic} is lost")


topics.add_command(reassign)


@topics.command(
    "verify",
    examples=[
        ("All partitions of a topic", "kafkalog topics verify flights"),
        ("Repair what is damaged, from other replicas", "kafkalog topics verify flights --repair"),
        (
            "One partition, at 10 MB/s, for a program",
            "kafkalog topics verify flights --partition 2 --bytes-per-second 10MB --json",
        ),
    ],
)
@click.argument("names", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--partition",
    "partitions",
    type=click.IntRange(0),
    multiple=True,
    help="Only this one; repeatable. Needs one TOPIC.",
)
@click.option("--repair", is_flag=True, help="Have damaged ranges repaired from other replicas.")
@click.option("--bytes-per-second", metavar="RATE", callback=rate, default="50MB", show_default=True,
              help="How fast each broker reads its disk, such as 10MB; 0: no limit.")  # fmt: skip
@bootstrap_option
@json_option
def verify(
    names: tuple[str, ...],
    partitions: tuple[int, ...],
    repair: bool,
    bytes_per_second: int,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Compare the replicas of TOPICs, or of all topics, up to the high watermark. Each broker reads the batches from
    its disk and checks them. Fails if a replica is damaged, differs from the leader, or was not checked."""
    if partitions and len(names) != 1:
        raise click.UsageError("--partition needs one TOPIC")
    found: list[VerifiedPartition] = []
    with admin_of(bootstrap) as admin:
        listed = admin.describe_topics(list(names) or None)
        wanted = {
            TopicPartition(topic.name, number)
            for topic in listed
            for number in partitions or range(len(topic.partitions))
        }
        extents = admin.extents([topic.name for topic in listed])
        _, size_bytes, _ = totals(extents, [each for each in wanted if each in extents])
        with progress("bytes compared", size_bytes) as advance:
            for topic in listed:
                found += admin.verify(
                    topic.name, partitions or None, repair=repair, bytes_per_second=bytes_per_second, advance=advance
                )
    faults = [fault for each in found for fault in each.faults]
    if as_json:
        print_json([_verified(each) for each in found])
    else:
        for fault in faults:
            where = (
                f"offsets {fault.start_offset} to {fault.end_offset - 1} "
                if fault.end_offset > fault.start_offset
                else ""
            )
            reason = f": {fault.reason}" if fault.reason else ""
            click.echo(f"{fault.partition} on broker {fault.broker_id}: {where}{fault.what}{reason}")
        replicas = sum(len(each.replicas) for each in found)
        click.echo(
            f"{counted(len(found), 'partition')}, {counted(replicas, 'replica')}, "
            f"{counted(sum(each.bytes for each in found), 'byte')} compared: {_count_of(faults)}"
        )
    if faults:
        where = f"{faults[0].partition} on broker {faults[0].broker_id}"
        raise KafkalogError(reason=f"{_count_of(faults)}, the first in {where}")


def _count_of(faults: Sequence[ReplicaFault]) -> str:
    unchecked = sum(fault.what == "not checked" for fault in faults)
    found = counted(len(faults) - unchecked, "fault")
    return f"{found}, {counted(unchecked, 'replica')} not checked" if unchecked else found


def _verified(each: VerifiedPartition) -> dict[str, Any]:
    return {
        "topic": each.partition.topic,
        "partition": each.partition.partition,
        "replicas": each.replicas,
        "start_offset": each.start_offset,
        "end_offset": each.end_offset,
        "batches": each.batches,
        "bytes": each.bytes,
        "faults": [
            {
                "broker": fault.broker_id,
                "what": fault.what,
                "start_offset": fault.start_offset,
                "end_offset": fault.end_offset,
                "reason": fault.reason,
            }
            for fault in each.faults
        ],
    }


@topics.command(
    "delete",
    examples=[
        ("With a confirmation", "kafkalog topics delete flights"),
        ("In a script", "kafkalog topics delete flights --if-exists --yes"),
    ],
)
@click.argument("topic")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required if stdin is not a terminal.")
@click.option("--if-exists", is_flag=True, help="Do nothing if the topic does not exist.")
@bootstrap_option
def delete(topic: str, yes: bool, if_exists: bool, bootstrap: str) -> None:
    """Delete TOPIC and its records."""
    confirm(f"delete topic {topic} and all its records?", yes)
    with admin_of(bootstrap) as admin:
        try:
            behind = admin.delete_topic(topic)
        except UnknownTopic:
            if not if_exists:
                raise
            click.echo(f"there is no topic {topic}")
            return
    click.echo(f"deleted topic {topic}")
    _warn_of(behind, "the deletion")


@click.command(
    cls=Command,
    examples=[
        ("Where each partition starts and ends", "kafkalog offsets flights"),
        ("With a group's offsets", "kafkalog offsets flights --group readers"),
    ],
)
@click.argument("topic")
@click.option("--group", callback=not_empty, help="Also show this consumer group's committed offsets and lag.")
@bootstrap_option
@json_option
def offsets(topic: str, group: str | None, bootstrap: str, as_json: bool) -> None:
    """Show the start and end offset of each partition of TOPIC."""
    with admin_of(bootstrap) as admin:
        [description] = admin.describe_topics([topic])
        partitions = _all_of(description)
        offsets_of = admin.describe_group(group).offsets if group else {}
        committed = {partition: each.offset for partition, each in offsets_of.items()} if group else None
        by_partition, failed = extent_rows(admin, partitions, committed)
    rows = list(by_partition.values())
    if as_json:
        print_json(rows)
    else:
        print_table(rows, [column for column in rows[0] if column != "error"])
    end_with(failed)
