"""`kafkalog log dump|verify`: look into a log's files without a broker."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kafkalog.cli.command import CommandGroup, json_option, partitions_named
from kafkalog.cli.output import as_text, counted, headers_as_text, json_line, print_json
from kafkalog.errors import KafkalogError

if TYPE_CHECKING:
    from broker.storage.dump import Verification, VerifiedLog

_path = click.argument("path", type=click.Path(exists=True, path_type=Path))
_topics = click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC[:P,P]",
    help="Only this topic, or these partitions of it; repeatable.",
)


@click.group(cls=CommandGroup)
def log() -> None:
    """Inspect segment files, partitions' folders, brokers' data directories and the directory of `local --data`. No
    broker is needed."""


@log.command(
    "dump",
    examples=[
        ("The batches of a broker's logs", "kafkalog log dump data/broker-0"),
        ("Records of two partitions of a topic", "kafkalog log dump data/broker-0 --topic flights:0,2 --records"),
    ],
)
@_path
@_topics
@click.option("--records", is_flag=True, help="Print the records too, not only their batches.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
def dump(path: Path, topics: tuple[str, ...], records: bool, as_json: bool) -> None:
    """Print the contents of the logs at PATH."""
    from broker.storage import dump as log_dump

    chosen = dict(map(partitions_named, topics))
    if as_json:
        for entry in log_dump.entries(path, records=records, topics=chosen):
            click.echo(json_line(_for_json(entry)))
    else:
        for line in log_dump.dump(path, records=records, topics=chosen):
            click.echo(line)


def _for_json(entry: dict[str, Any]) -> dict[str, Any]:
    if entry["kind"] != "record":
        return entry
    texts = as_text("key", entry["key"]) | as_text("value", entry["value"])
    rest = {name: value for name, value in entry.items() if name not in ("key", "value", "headers")}
    return rest | texts | {"headers": headers_as_text(entry["headers"])}


@log.command(
    "verify",
    examples=[
        ("All logs of a broker", "kafkalog log verify data/broker-0"),
        ("One topic, for a program", "kafkalog log verify data/broker-0 --topic flights --json"),
    ],
)
@_path
@_topics
@json_option
def verify(path: Path, topics: tuple[str, ...], as_json: bool) -> None:
    """Check every batch and index of the logs at PATH; fails if any is damaged."""
    from broker.storage import dump as log_dump

    found = log_dump.verify(path, dict(map(partitions_named, topics)))
    if as_json:
        totals = {name: getattr(found, name) for name in (*_COUNTS, "torn_bytes")}
        print_json(totals | asdict(found) | {"problems": [asdict(problem) for problem in found.problems]})
    else:
        for problem in found.problems:
            click.echo(str(problem))
        for each in found.logs:
            click.echo(f"{each.partition or 'unnamed'}  {each.folder}: {_counts(each)}")
        if len(found.logs) != 1:
            click.echo(f"{counted(len(found.logs), 'log')}: {_counts(found)}")
    if found.problems:
        count = counted(len(found.problems), "problem")
        raise KafkalogError(reason=f"{path}: {count}, the first: {found.problems[0]}")


_COUNTS = {"segments": "segment", "batches": "batch", "records": "record", "bytes": "byte"}


def _counts(found: Verification | VerifiedLog) -> str:
    torn = f"; {found.torn_bytes} torn bytes at the end, which the next start cuts off" if found.torn_bytes else ""
    return ", ".join(counted(getattr(found, name), each) for name, each in _COUNTS.items()) + torn
