"""`kafkalog groups ...`: groups' offsets and live members, and setting their offsets."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from kafkalog.cli.command import (
    CommandGroup,
    bootstrap_option,
    confirm,
    json_option,
    merged,
    partitions_named,
    timestamp_us,
)
from kafkalog.cli.extents import extent_rows, unread_bytes, unread_seconds
from kafkalog.cli.output import admin_of, counted, end_with, print_json, print_rows, print_table
from kafkalog.records import by_topic, ranges

if TYPE_CHECKING:
    from kafkalog.client.admin import Admin
    from kafkalog.client.groups import GroupInfo
    from kafkalog.errors import KafkalogError
    from kafkalog.records import TopicPartition

_LOOK_SECONDS = 0.5
_MILLISECOND = 0.001
_RENEWED_SECONDS = 1.0
"""A lease that ends later by more than that was renewed: members renew it every few seconds."""
_COLUMNS = [
    "topic", "partition", "start_offset", "end_offset", "size_bytes", "committed", "lag", "lag_bytes", "lag_seconds",
    "committed_at", "owner",
]  # fmt: skip
_SPARE = ["start_offset", "size_bytes", "lag_bytes", "committed_at", "end_offset"]
"""Left out on a terminal that is too narrow, the first one first."""
_MEMBER_COLUMNS = ["member", "host", "client_id", "group_instance_id", "since", "subscription", "owned"]
_MEMBER_SPARE = ["since", "host", "client_id"]


@click.group(cls=CommandGroup)
def groups() -> None:
    """List, describe, reset and delete consumer groups and streams' groups."""


@groups.command(
    "list",
    examples=[
        ("All groups", "kafkalog groups list"),
    ],
)
@bootstrap_option
@json_option
def list_groups(bootstrap: str, as_json: bool) -> None:
    """List the groups: the kind of members of each (consumer or stream), the number of live ones, and the topics for
    which the group has offsets."""
    with admin_of(bootstrap) as admin:
        rows = [
            {
                "group": group.name,
                "kind": group.kind or None,
                "topics": list(group.topics),
                "live_members": group.live_members,
            }
            for group in admin.groups()
        ]
    print_rows(rows, ["group", "kind", "live_members", "topics"], as_json, "there are no groups")


@groups.command(
    "describe",
    examples=[
        ("Offsets, lag, owners and members", "kafkalog groups describe readers"),
        ("Also for how long records have waited", "kafkalog groups describe readers --seconds"),
    ],
)
@click.argument("group")
@click.option(
    "--seconds",
    is_flag=True,
    help="Also the lag in seconds: the age of the first record not consumed. Reads a batch of each partition that has "
    "a lag.",
)
@bootstrap_option
@json_option
def describe(group: str, seconds: bool, bootstrap: str, as_json: bool) -> None:
    """Describe GROUP: its offset, lag and owner in each partition of its topics, its live members with what they read,
    and who waits for a partition that another member still owns. The lag in bytes is the size of the batches from the
    offset on. A terminal that is too narrow shows fewer columns; --json prints all."""
    with admin_of(bootstrap) as admin:
        found, failed = _description(admin, group, seconds)
    if as_json:
        print_json(found)
        end_with(failed)
        return
    if found["partitions"]:
        _print_columns(found["partitions"], _COLUMNS, always=_COLUMNS[:7], spare=_SPARE)
    else:
        click.echo(f"group {group} has no offset in any topic that is there")
    click.echo(
        f"\nlag {counted(found['lag'], 'record')}, {found['lag_bytes']} of {found['size_bytes']} bytes in the log"
    )
    if found["kind"]:
        by = f", assignor {found['assignor']}" if found["assignor"] else ""
        click.echo(f"kind {found['kind']}, generation {found['generation']}{by}")
    if found["members"]:
        click.echo("")
        rows = [row | {"owned": _listed(row["owned"])} for row in found["members"]]
        _print_columns(rows, _MEMBER_COLUMNS, always=["member", "host", "since", "subscription"], spare=_MEMBER_SPARE)
    else:
        click.echo("no live member")
    for each in found["waits"]:
        whose = f", which {each['owner']} still owns" if each["owner"] else ", which nobody owns now"
        click.echo(f"{each['member']} waits for {_listed(each['partitions'])}{whose}")
    end_with(failed)


def _description(
    admin: Admin, group: str, with_seconds: bool
) -> tuple[dict[str, Any], dict[TopicPartition, KafkalogError]]:
    """The group, and the errors of partitions that are not served, or have no lag; the sums are those of the others."""
    from kafkalog.errors import UnknownTopic
    from kafkalog.records import TopicPartition

    described = admin.describe_group(group)
    owners = described.owners()
    partitions: list[TopicPartition] = []
    for name in sorted({partition.topic for partition in [*described.offsets, *owners]}):
        try:
            [topic] = admin.describe_topics([name])
        except UnknownTopic:
            continue  # deleted meanwhile
        partitions += [TopicPartition(name, each.partition) for each in topic.partitions]
    committed = {partition: reached.offset for partition, reached in described.offsets.items()}
    rows, failed = extent_rows(admin, partitions, committed)
    unread = {
        partition: max(committed.get(partition, 0), row["start_offset"])
        for partition, row in rows.items()
        if row["lag"]
    }
    sizes = unread_bytes(admin, unread)
    ages = unread_seconds(admin, unread) if with_seconds else {}
    for partition, row in rows.items():
        is_known = row["lag"] is not None
        reached = described.offsets.get(partition)
        row |= {
            "lag_bytes": sizes.get(partition, 0) if is_known else None,
            "lag_seconds": ages.get(partition, 0.0) if is_known and with_seconds else None,
            "committed_at": None if reached is None else _time(reached.committed_us),
            "owner": owners.get(partition),
        }
    return {
        "group": group,
        "kind": described.kind or None,
        "generation": described.generation,
        "assignor": described.assignor or None,
        "lag": sum(row["lag"] or 0 for row in rows.values()),
        "lag_bytes": sum(row["lag_bytes"] or 0 for row in rows.values()),
        "size_bytes": sum(row["size_bytes"] or 0 for row in rows.values()),
        "partitions": [{"topic": partition.topic, **row} for partition, row in rows.items()],
        "members": [
            {
                "member": member.name,
                "host": member.host,
                "process": member.process,
                "client_id": member.client_id or None,
                "group_instance_id": member.instance_id or None,
                "since": _time(member.since_us),
                "lease_left_ms": member.left_ms,
                "subscription": member.subscription,
                "topics": list(member.topics),
                "pattern": member.pattern or None,
                "share": by_topic(member.share),
                "owned": by_topic(member.owned),
            }
            for member in described.members
        ],
        "waits": _waits(described),
    }, failed


def _waits(described: GroupInfo) -> list[dict[str, Any]]:
    """Who waits for which partitions of whom."""
    waits: dict[tuple[str, str], list[TopicPartition]] = {}
    for each in described.awaited():
        waits.setdefault((each.member, each.owner), []).append(each.partition)
    return [
        {"member": member, "owner": owner or None, "partitions": by_topic(partitions)}
        for (member, owner), partitions in waits.items()
    ]


def _listed(partitions: Mapping[str, Sequence[int]]) -> str:
    """flights:0-3,7 delays:1"""
    return " ".join(f"{topic}:{ranges(numbers)}" for topic, numbers in partitions.items())


def _print_columns(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], always: Collection[str], spare: Sequence[str]
) -> None:
    """A table without those columns that are empty."""
    shown = [name for name in columns if name in always or any(row[name] not in (None, "") for row in rows)]
    print_table(rows, shown, spare)


def _time(time_us: int) -> str:
    return datetime.fromtimestamp(time_us // 1_000_000, UTC).isoformat()


@groups.command(
    "reset",
    examples=[
        ("Read all records again", "kafkalog groups reset readers --to earliest"),
        (
            "Records since noon, in one topic",
            "kafkalog groups reset readers --topic flights --to-timestamp 2013-06-01T12:00",
        ),
        (
            "Show the offsets 100 records back in each partition",
            "kafkalog groups reset readers --shift-by -100 --dry-run",
        ),
        ("Skip a record that cannot be processed", "kafkalog groups reset readers --topic flights:2 --shift-by 1"),
        ("Set where a new group begins", "kafkalog groups reset readers --create --topic flights --to latest"),
    ],
)
@click.argument("group")
@click.option("--to", type=click.Choice(["earliest", "latest"]), help="The start or the end of each partition.")
@click.option("--to-offset", type=click.IntRange(0), metavar="N", help="The offset to consume next.")
@click.option(
    "--to-timestamp",
    "to_timestamp_us",
    metavar="TIME",
    callback=timestamp_us,
    help="The first record at or after this time: ISO-8601 (UTC unless a zone is given) or milliseconds since 1970.",
)
@click.option(
    "--shift-by",
    type=int,
    metavar="N",
    help="Move each offset by N records, back if negative, within the log.",
)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC[:P,P]",
    help="Only this topic, or these partitions of it; repeatable. Default: all for which the group has offsets.",
)
@click.option("--create", is_flag=True, help="Allow a group that does not exist yet.")
@click.option("--dry-run", is_flag=True, help="Show what would be set, and set nothing.")
@click.option(
    "--force",
    is_flag=True,
    help="Reset although a Spark stream is live, which overwrites the reset: each partition when it goes on there, all "
    "of them when it stops. Refused while consumers are live that subscribed: they own the offsets.",
)
@click.option(
    "--wait",
    is_flag=True,
    help="Wait until no member is live; a member that was killed counts as live until its lease ends, a Spark stream's "
    "after at most 10 s, a consumer's after its session.timeout.ms.",
)
@bootstrap_option
@json_option
def reset(
    group: str,
    to: str | None,
    to_offset: int | None,
    to_timestamp_us: int | None,
    shift_by: int | None,
    topics: tuple[str, ...],
    create: bool,
    dry_run: bool,
    force: bool,
    wait: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Set the offsets at which GROUP continues. Stop its members first: while one is live, a Spark stream or a consumer
    that subscribed, the reset is refused. A Consumer that assigns its partitions itself is no member: its next commit
    overwrites the reset."""
    from kafkalog.client.admin import AtTimestamp, ShiftBy
    from kafkalog.client.groups import GroupInfo
    from kafkalog.errors import UnknownGroup

    if force and wait:
        raise click.UsageError("--force does not wait: give it or --wait")
    if dry_run and (force or wait):
        raise click.UsageError("--dry-run sets nothing, whoever is live: leave out --force and --wait")
    places: list[str | int | AtTimestamp | ShiftBy] = [
        *([to] if to is not None else []),
        *([to_offset] if to_offset is not None else []),
        *([AtTimestamp(to_timestamp_us)] if to_timestamp_us is not None else []),
        *([ShiftBy(shift_by)] if shift_by is not None else []),
    ]
    if len(places) != 1:
        begin = "give only one of" if places else "say where to: one of"
        raise click.UsageError(f"{begin} --to, --to-offset, --to-timestamp and --shift-by")
    named = merged(partitions_named(text) for text in topics)
    with admin_of(bootstrap) as admin:
        try:
            described = admin.describe_group(group)
        except UnknownGroup as error:
            if not create:
                error.add_note("for a new group, give --create")
                raise
            described = GroupInfo(group, {}, ())
        before = described.offsets
        chosen = _chosen(admin, named) if named else list(before)
        if not chosen:
            raise click.ClickException(f"group {group} has no offset in any topic that is there; name one with --topic")
        wanted = dict.fromkeys(chosen, places[0])
        if dry_run:
            written = admin.reset_offsets(group, wanted, create=create, dry_run=True)
        else:
            written = _written(admin, group, wanted, force, wait, create)
    rows = [
        {
            "topic": partition.topic,
            "partition": partition.partition,
            "was": before[partition].offset if partition in before else None,
            "is": offset,
        }
        for partition, offset in sorted(written.items())
    ]
    if as_json:
        print_json(rows)
    else:
        print_table(rows, list(rows[0]))
    if dry_run:
        live = "".join(f"; {each.name} is live: a reset is refused until it stops" for each in described.members[:1])
        click.echo(f"nothing is set: this is what group {group} would get{live}", err=True)


def _written(
    admin: Admin, group: str, to: dict[TopicPartition, Any], force: bool, wait: bool, create: bool = False
) -> dict[TopicPartition, int]:
    """Reset the group's offsets; if wanted, wait first until no member is live."""
    from kafkalog.errors import GroupIsLive

    lease_ends: dict[str, float] = {}  # of each member, as it was first seen
    renewed: set[str] = set()
    while True:
        try:
            return admin.reset_offsets(group, to, force, create)
        except GroupIsLive as live:
            if not wait:
                raise
            left = live.facts["left_ms"] / 1000
            who = f"{live.facts['member']} on {live.facts['host']}"
            if who not in lease_ends:
                lease_ends[who] = time.monotonic() + left
                ends = datetime.now().astimezone() + timedelta(seconds=left)
                click.echo(f"waiting for {who} to leave, or for its lease to end at {ends:%H:%M:%S}", err=True)
            elif time.monotonic() + left > lease_ends[who] + _RENEWED_SECONDS and who not in renewed:
                renewed.add(who)
                click.echo(f"{who} goes on and renews its lease: stop it", err=True)
            # No event reports the end of a lease, and brokers do not notify clients of a member that leaves:
            # this looks again when the lease can have ended, or sooner. Ctrl-C ends the wait at once.
            time.sleep(min(left + _MILLISECOND, _LOOK_SECONDS))


def _chosen(admin: Admin, named: dict[str, list[int]]) -> list[TopicPartition]:
    from kafkalog.records import TopicPartition

    return [
        TopicPartition(topic.name, number)
        for topic in admin.describe_topics(list(named))
        for number in (named[topic.name] or [each.partition for each in topic.partitions])
    ]


@groups.command(
    "delete",
    examples=[
        ("With a confirmation", "kafkalog groups delete readers"),
        ("Two groups, in a script", "kafkalog groups delete readers auditors --yes"),
    ],
)
@click.argument("names", nargs=-1, required=True, metavar="GROUP...")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required if stdin is not a terminal.")
@bootstrap_option
def delete(names: tuple[str, ...], yes: bool, bootstrap: str) -> None:
    """Delete GROUPs with their offsets. Refused while a member is live. A Consumer that assigns its partitions itself
    is no member: its next commit creates its group again."""
    whose = f"group {names[0]} and its" if len(names) == 1 else f"groups {', '.join(names)} and their"
    confirm(f"delete {whose} offsets?", yes)
    with admin_of(bootstrap) as admin:
        for name in names:
            admin.delete_group(name)
            click.echo(f"deleted group {name}")
