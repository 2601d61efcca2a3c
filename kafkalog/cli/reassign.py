"""`kafkalog topics reassign`: move partitions to other brokers, and show how far they are."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kafkalog.cli.command import Command, bootstrap_option, json_option, rate
from kafkalog.cli.extents import live_brokers, not_live
from kafkalog.cli.output import admin_of, counted, end_with, named_brokers, print_json, print_none, print_table
from kafkalog.records import TopicPartition

if TYPE_CHECKING:
    from kafkalog.client.admin import Admin
    from kafkalog.client.reassignments import Reassignment, ReassignmentProgress

_LOOK_SECONDS = 0.5  # brokers notify no client of how far they are
_LOOKS_PER_CHECK = 20  # for moves that cannot go on because brokers are away
_COLUMNS = ["topic", "partition", "replicas", "target"]
_STATUS_COLUMNS = [*_COLUMNS, "not_live", "isr", "size_bytes", "lacking_bytes", "throttled_rate"]


def _numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int]:
    """`0-3,7` as numbers."""
    found: list[int] = []
    for part in text.split(",") if text is not None else ():
        first, dash, last = (each.strip() for each in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise click.BadParameter(f"expected numbers such as 1,2,3 or 0-3, not '{text}'", context, parameter)
        if int(last or first) >= 1 << 31:
            raise click.BadParameter(f"'{part}' is too large", context, parameter)
        found += range(int(first), int(last or first) + 1)
    return found


@click.command(
    "reassign",
    cls=Command,
    examples=[
        ("Spread a topic over three brokers", "kafkalog topics reassign flights --to-brokers 1,2,3"),
        (
            "Three copies instead of one, copied at 50 MB a second",
            "kafkalog topics reassign flights --replication-factor 3 --throttle 50MB",
        ),
        ("Move everything off a lost broker", "kafkalog topics reassign --from-broker 2"),
        ("Show how far all moves are", "kafkalog topics reassign --status"),
        ("Raise the rate of a move", "kafkalog topics reassign flights --throttle 200MB"),
        ("Cancel a move", "kafkalog topics reassign flights --cancel"),
    ],
)
@click.argument("topic", required=False)
@click.option("--partitions", metavar="0-3,7", callback=_numbers, help="Only these partitions of TOPIC.")
@click.option(
    "--to-brokers", metavar="1,2,3", callback=_numbers,
    help="Spread the replicas over these brokers, as evenly as that goes, by rack too.",
)  # fmt: skip
@click.option("--from-broker", type=click.IntRange(0), metavar="N",
              help="Move all replicas off this broker, which may be lost; to --to-brokers, or all others.")  # fmt: skip
@click.option("--replication-factor", type=click.IntRange(1), help="Copies of each partition; default: as many as now.")
@click.option("--throttle", metavar="RATE", callback=rate,
              help="Bytes a second that each broker copies, such as 50MB; 0: no limit, which is the default. A move "
              "that is under way keeps its rate until another one, or 0, is given. Alone: of what is being moved. "
              "Replicas that are in sync are never slowed down.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only show what would be moved.")
@click.option("--no-wait", is_flag=True, help="Do not wait until everything is moved.")
@click.option("--status", is_flag=True, help="Only show what is being moved, of TOPIC or all topics.")
@click.option("--cancel", is_flag=True, help="Leave what is being moved, of TOPIC or all topics, where it was.")
@bootstrap_option
@json_option
def reassign(
    topic: str | None,
    partitions: list[int],
    to_brokers: list[int],
    from_broker: int | None,
    replication_factor: int | None,
    throttle: int | None,
    dry_run: bool,
    no_wait: bool,
    status: bool,
    cancel: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Move partitions of TOPIC to other brokers, or change their number of copies. Producers and consumers go on. The
    command waits until everything is moved; Ctrl-C ends the wait and not the move."""
    moves = bool(to_brokers) or from_broker is not None or replication_factor is not None
    if partitions and topic is None:
        raise click.UsageError("--partitions needs a TOPIC")
    if sum((moves, status, cancel)) > 1:
        raise click.UsageError("give only one of --status, --cancel, and options that say where to move partitions")
    if throttle is not None and (status or cancel):
        raise click.UsageError(f"--{'status' if status else 'cancel'} changes no rate: give --throttle without it")
    if moves and topic is None and from_broker is None:
        raise click.UsageError("name a TOPIC, or the broker that all topics leave (--from-broker)")
    if not (moves or status or cancel) and throttle is None:
        raise click.UsageError("nothing to do: give --to-brokers, --from-broker, --replication-factor, --throttle, "
                               "--status or --cancel")  # fmt: skip
    with admin_of(bootstrap) as admin:
        if status:
            _show_status(admin.reassignments(topic, partitions), live_brokers(admin), as_json)
        elif cancel:
            cancelled = admin.cancel_reassignments(topic, partitions, dry_run=dry_run)
            _show(cancelled, as_json, "would be back at" if dry_run else "back at", _none(topic))
        elif not moves:
            assert throttle is not None
            throttled = admin.throttle_reassignments(throttle, topic, partitions, dry_run=dry_run)
            _show(throttled, as_json, "going to", _none(topic))
        else:
            begun = admin.reassign(
                topic,
                partitions,
                to_brokers=to_brokers,
                from_broker=from_broker,
                replication_factor=replication_factor,
                throttled_rate=throttle,
                dry_run=dry_run,
            )
            moved = [each.partition for each in begun if each.error is None]
            if moved and not (dry_run or no_wait):
                _wait(admin, topic, moved)
            what = "would go to" if dry_run else "going to" if no_wait else "now at"
            nothing = "the partitions are on these brokers already"
            if from_broker is not None and not begun:
                unknown = "" if from_broker in live_brokers(admin) else ", which is not registered in the cluster"
                nothing = f"no partition{'' if topic is None else f' of {topic}'} is on broker {from_broker}{unknown}"
            _show(begun, as_json, what, f"nothing to do: {nothing}")


def _none(topic: str | None) -> str:
    return f"no partition{'' if topic is None else f' of {topic}'} is being moved"


def _show(changed: Sequence[Reassignment], as_json: bool, what: str, none: str) -> None:
    if as_json:
        print_json([{**_row(each), "error": None if each.error is None else str(each.error)} for each in changed])
    elif not changed:
        print_none(none)
    elif done := [{**_row(each), what: each.target} for each in changed if each.error is None]:
        print_table(done, ["topic", "partition", "replicas", what])
    end_with({each.partition: each.error for each in changed if each.error is not None})


def _row(each: Reassignment | ReassignmentProgress) -> dict[str, Any]:
    topic, number = each.partition
    return {"topic": topic, "partition": number, "replicas": list(each.replicas), "target": list(each.target)}


def _show_status(found: Sequence[ReassignmentProgress], live: Collection[int], as_json: bool) -> None:
    rows = [
        {
            **_row(each),
            "not_live": not_live(each.target, live),
            "adding": list(each.adding),
            "removing": list(each.removing),
            "isr": list(each.isr),
            "size_bytes": each.size_bytes,
            "lacking_bytes": sum(each.lacking_bytes.values()) if each.size_bytes is not None else None,
            "throttled_rate": each.throttled_rate or None,
        }
        for each in found
    ]
    if as_json:
        print_json(rows)
    elif rows:
        is_waiting = any(row["not_live"] for row in rows)
        print_table(rows, [name for name in _STATUS_COLUMNS if name != "not_live" or is_waiting])
    else:
        print_none("no partition is being moved")


def _wait(admin: Admin, topic: str | None, moved: Sequence[TopicPartition]) -> None:
    """Wait until some partitions are moved, and show how far they are."""
    left, sizes, told = set(moved), dict[Any, int](), set[tuple[TopicPartition, str]]()
    try:
        click.echo(f"moving {counted(len(moved), 'partition')}; Ctrl-C ends this wait and not the move", err=True)
        with _bar(counted(len(moved), "partition")) as show:
            for look in itertools.count(1):
                found = {each.partition: each for each in admin.reassignments(topic)}
                left &= found.keys()
                sizes |= {
                    partition: each.size_bytes * len(each.adding)
                    for partition, each in found.items()
                    if partition in moved and each.size_bytes is not None
                }
                lacking = sum(sum(found[partition].lacking_bytes.values()) for partition in left)
                show(max(0, sum(sizes.values()) - lacking), sum(sizes.values()))
                if not left:
                    return
                if look % _LOOKS_PER_CHECK == 0:
                    waiting = {(each, why) for each, why in _why_waiting(admin, topic, found).items() if each in left}
                    for partition, why in sorted(waiting - told):
                        click.echo(f"{partition} waits: {why}", err=True)
                    told = waiting
                # The controller ends a move, and no broker notifies clients of that. This looks again twice a second,
                # also to draw the bar; Ctrl-C ends it at once.
                time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(
            f"{counted(len(left), 'partition')} not moved yet: that goes on without this command; "
            "`kafkalog topics reassign --status` shows it, and --cancel ends it"
        )
        raise


def _why_waiting(
    admin: Admin, topic: str | None, moving: Mapping[TopicPartition, ReassignmentProgress]
) -> dict[TopicPartition, str]:
    """Why moves do not go on, and what to do: those of partitions that nobody leads, or whose target is not live."""
    live = live_brokers(admin)
    cancel = f"`kafkalog topics reassign {'' if topic is None else f'{topic} '}--cancel`"
    found = {}
    for partition, each in moving.items():
        if away := not_live(each.target, live):
            are, them = ("is", "it") if len(away) == 1 else ("are", "them")
            found[partition] = f"{named_brokers(away)} {are} not live; start {them}, or {cancel}"
    for described in admin.describe_topics(None if topic is None else [topic]):
        for info in described.partitions:
            if info.is_offline(live):
                partition = TopicPartition(described.name, info.partition)
                found[partition] = "no live broker leads it; start one that has its log"
    return found


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal; yields `show(copied bytes, all bytes)`."""
    if not sys.stderr.isatty():
        yield lambda copied, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = [
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    ]  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"moving {what}", total=None)
        yield lambda copied, total: bar.update(task, completed=copied, total=total)
