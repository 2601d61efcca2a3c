"""`kafkalog log dump|verify`: look into a log's files without a broker. They load `broker` when they are called."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kafkalog.cli.output import as_text, headers_as_text, json_option, print_json
from kafkalog.errors import KafkalogError

_path = click.argument("path", type=click.Path(exists=True, path_type=Path))


@click.group()
def log() -> None:
    """Look into segment files, partitions' folders and data directories; no broker is needed."""


@log.command("dump")
@_path
@click.option("--records", is_flag=True, help="Show the records too, not just their batches.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
def dump(path: Path, records: bool, as_json: bool) -> None:
    """Print what stands in the log at PATH."""
    from broker.storage import dump as log_dump

    if as_json:
        for entry in log_dump.entries(path, records=records):
            click.echo(json.dumps(_for_json(entry)))
    else:
        for line in log_dump.dump(path, records=records):
            click.echo(line)


def _for_json(entry: dict[str, Any]) -> dict[str, Any]:
    if entry["kind"] != "record":
        return entry
    texts = as_text("key", entry["key"]) | as_text("value", entry["value"])
    rest = {name: value for name, value in entry.items() if name not in ("key", "value", "headers")}
    return rest | texts | {"headers": headers_as_text(entry["headers"])}


@log.command("verify")
@_path
@json_option
def verify(path: Path, as_json: bool) -> None:
    """Check every batch and index of the log at PATH; fails if any is damaged."""
    from broker.storage import dump as log_dump

    found = log_dump.verify(path)
    if as_json:
        print_json(asdict(found))
    else:
        for problem in found.problems:
            click.echo(str(problem))
        torn = f"; {found.torn_bytes} torn bytes at the end, which the next start cuts off" if found.torn_bytes else ""
        click.echo(
            f"{found.segments} segments, {found.batches} batches, {found.records} records, {found.bytes} bytes{torn}"
        )
    if found.problems:
        raise KafkalogError(reason=f"{path}: {len(found.problems)} problems, the first of them: {found.problems[0]}")
