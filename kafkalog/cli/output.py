"""The output of commands: tables for people, JSON for programs, progress on a terminal.

A table is as wide as the terminal; in a pipe it is as wide as it needs to be, so that nothing is cut or wrapped. A list
without entries is a sentence on stderr, or `[]` as JSON.
"""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kafkalog.config import nearest_hint
from kafkalog.errors import BrokerUnreachable, UnknownTopic

if TYPE_CHECKING:
    from rich.table import Table

    from kafkalog.client.admin import Admin
    from kafkalog.errors import KafkalogError
    from kafkalog.records import TopicPartition

_WAIT_TOLD_SECONDS = 1.0
_WIDE = 100_000
"""Columns of what is no terminal: nothing is cut or wrapped."""
START_ONE = "start a cluster (`kafkalog local`), or give the address of one with --bootstrap or KAFKALOG_BOOTSTRAP"


@contextmanager
def admin_of(bootstrap: str) -> Iterator[Admin]:
    """An Admin of a cluster that answers. If no broker answers within a second, a terminal shows what is waited for. An
    UnknownTopic raised in the block gets a hint with the nearest name.

    Raises:
        BrokerUnreachable: no broker answered within bootstrap.timeout.ms.
    """
    from kafkalog.client.admin import Admin

    def tell() -> None:
        if sys.stderr.isatty():
            click.echo(f"waiting for a broker at {bootstrap} ...", err=True)

    with Admin(bootstrap) as admin:
        timer = threading.Timer(_WAIT_TOLD_SECONDS, tell)
        timer.daemon = True
        timer.start()
        try:
            admin.describe_cluster()
        except BrokerUnreachable as error:
            error.add_note(START_ONE)
            raise
        finally:
            timer.cancel()
        try:
            yield admin
        except UnknownTopic as error:
            near = nearest_hint(str(error.facts.get("topic")), [topic.name for topic in admin.topics()])
            if near:
                error.add_note(near.removeprefix("; "))
            raise


def counted(count: int, what: str) -> str:
    """`1 batch`, `2 batches`."""
    return f"{count} {what}" + ("" if count == 1 else "es" if what.endswith("ch") else "s")


def named_brokers(broker_ids: Sequence[int]) -> str:
    """`broker 1`, `brokers 1, 2`."""
    return f"{'broker' if len(broker_ids) == 1 else 'brokers'} {', '.join(map(str, broker_ids))}"


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def json_line(value: Any) -> str:
    """An object of a long list: JSON in one line, without a newline."""
    return json.dumps(value, ensure_ascii=False)


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], as_json: bool, none: str) -> None:
    """A list as a table or as JSON.

    Args:
        none: the sentence that is printed for an empty table.
    """
    if as_json:
        print_json(rows)
    elif rows:
        print_table(rows, columns)
    else:
        print_none(none)


def print_none(sentence: str) -> None:
    """Print on stderr that a list is empty, so that a program that reads the list reads nothing."""
    click.echo(sentence, err=True)


def say_failure(partition: TopicPartition, error: KafkalogError) -> None:
    """Print on stderr, in one sentence, why a command leaves a partition out."""
    sentence = " ".join(str(error).split())
    click.echo(f"kafkalog: {sentence if str(partition) in sentence else f'{partition}: {sentence}'}", err=True)


def end_with(failed: Mapping[TopicPartition, KafkalogError]) -> None:
    """End a command after its output. If partitions were left out, call `say_failure` for each, and exit with code
    1."""
    for partition, error in failed.items():
        say_failure(partition, error)
    if failed:
        raise click.exceptions.Exit(1)


def as_text(name: str, data: bytes | None) -> dict[str, str | None]:
    """{name: text} of bytes for JSON; {name_base64: ...} if they are not UTF-8."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        assert data is not None
        return {f"{name}_base64": base64.b64encode(data).decode()}


def headers_as_text(headers: Iterable[tuple[str, bytes | None]]) -> list[dict[str, str | None]]:
    """Headers for JSON, as a list, because a key may occur twice."""
    return [{"key": key, **as_text("value", value)} for key, value in headers]


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], spare: Iterable[str] = ()) -> None:
    """One line a row; None is shown as `-`, numbers are aligned right.

    Args:
        spare: columns that are left out on a terminal that is too narrow for all, the first one first.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False, markup=False, emoji=False)
    unlimited = console.options.update(width=_WIDE)
    table = _table(rows, columns)
    for name in spare:
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
        columns = [each for each in columns if each != name]
        table = _table(rows, columns)
    with console.capture() as capture:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        right = any(isinstance(row[column], int | float) and not isinstance(row[column], bool) for row in rows)
        table.add_column(column.upper().replace("_", " "), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    return table


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={item}" for name, item in value.items()) or "-"
    return str(value)


@contextmanager
def progress(what: str, total: int | None = None, watched: bool | None = None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; yields `advance(count)`, which costs nothing if the bar is not shown.

    Args:
        what: what is counted, as the bar names it.
        total: None if it is not known.
        watched: whether to show the bar; None: if stderr is a terminal.
    """
    if not (sys.stderr.isatty() if watched is None else watched):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
