"""What commands print: tables for people, JSON for programs, progress for who watches; and options that they share.

A table is as wide as the terminal; in a pipe it is as wide as it needs to be, so that nothing is cut or wrapped.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

DEFAULT_BOOTSTRAP = "127.0.0.1:9192"

bootstrap_option = click.option(
    "--bootstrap",
    metavar="HOST:PORT",
    envvar="KAFKALOG_BOOTSTRAP",
    default=DEFAULT_BOOTSTRAP,
    show_default=True,
    show_envvar=True,
    help="gRPC address of one or more brokers, separated by commas; the rest of the cluster is found from there.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def not_empty(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A text that is given must say something (`--group "$GROUP"` with nothing in it); a click callback."""
    if value == "":
        raise click.BadParameter("it must not be empty", context, parameter)
    return value


def pairs(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE arguments as a dict; a click callback."""
    found = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"expected NAME=VALUE, not '{text}'", context, parameter)
        found[name.strip()] = value.strip()
    return found


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def as_text(name: str, data: bytes | None) -> dict[str, str | None]:
    """{name: text} of bytes for JSON; {name_base64: ...} if they are not UTF-8."""
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        assert data is not None
        return {f"{name}_base64": base64.b64encode(data).decode()}


def headers_as_text(headers: Iterable[tuple[str, bytes | None]]) -> list[dict[str, str | None]]:
    """Headers for JSON; a list, for a key may be there twice."""
    return [{"key": key, **as_text("value", value)} for key, value in headers]


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """One line a row; None is shown as `-`, numbers are aligned right."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 100_000, highlight=False, markup=False, emoji=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        right = any(isinstance(row[column], int | float) and not isinstance(row[column], bool) for row in rows)
        table.add_column(column.upper().replace("_", " "), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    with console.capture() as capture:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


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
    """A progress bar on stderr while a person watches; hands out `advance(count)`, which costs nothing in a pipe.

    Args:
        what: what is counted, as the bar says it.
        total: None if it is not known.
        watched: whether to show it; None: if stderr is a terminal.
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
