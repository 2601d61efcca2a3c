"""`kafkalog produce` and `consume`: convert lines to records, and records to lines.

Plain lines are bytes, and are not changed. `produce --json` reads what `consume --format json` prints, without loss: a
field that is not UTF-8 is in base64 under its name with `_base64` added, null is null and empty is "".
"""

from __future__ import annotations

import base64
import functools
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kafkalog.cli.command import Command, bootstrap_option, headers, not_empty, pairs, timestamp_us
from kafkalog.cli.extents import readable
from kafkalog.cli.line_reader import LineReader
from kafkalog.cli.output import admin_of, as_text, counted, headers_as_text, json_line, progress, say_failure
from kafkalog.cli.pipe import ReadLines, WrittenPipe, is_pipe
from kafkalog.client.background import in_background
from kafkalog.config import nearest_hint
from kafkalog.errors import (
    BatchTooLarge,
    FileRefused,
    InvalidArgument,
    KafkalogError,
    MemberFenced,
    NotOwner,
    OffsetOutOfRange,
    PartitionLost,
    RecordTooLarge,
    RetriableError,
    StorageFailed,
    UnknownGroup,
    UnknownMember,
    UnknownPartition,
    UnknownTopic,
    UnknownTopicId,
)
from kafkalog.records import TopicPartition

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import FrameType

    from kafkalog.client.admin import Admin, AtTimestamp, PartitionExtent
    from kafkalog.client.consumer.consumer import Consumer
    from kafkalog.records import Message, RecordMetadata

_COUNT_EVERY = 1000
_COMMIT_EVERY = 10_000
_COMMIT_SECONDS = 1.0
_IDLE_SECONDS = 0.2
_LOOK_SECONDS = 5.0
"""That long after a look at partitions that are not served comes the next."""
_MAY_PASS = (RetriableError, PartitionLost, StorageFailed, FileRefused)
"""Why partitions are not served, if they may be again: their broker comes back, or an operator acts."""
_NULL = "\\N"
"""Text for null in plain lines, as in SQL databases' text files."""


class _Record(NamedTuple):
    """A record to be sent."""

    value: bytes | None
    key: bytes | None = None
    partition: int | None = None
    timestamp_us: int | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()


@click.command(
    cls=Command,
    examples=[
        ("Each line of a file is a record", "kafkalog produce flights < flights.txt"),
        ("With keys, which choose the partition", "echo 'N14228:late' | kafkalog produce flights --key-separator :"),
        (
            "A tombstone, with a header",
            r"echo 'N14228:\N' | kafkalog produce flights --key-separator : --null '\N' -H source=cleanup",
        ),
        (
            "Copy keys and values, without line ends in them and without tabs in keys",
            (
                "kafkalog consume flights --group g --format key-value"
                r" | kafkalog produce copy --key-separator '\t' --null '\N'"
            ),
        ),
        (
            "Copy a topic, headers, times and partitions included",
            "kafkalog consume flights --from-beginning --exit-at-end --format json | kafkalog produce copy --json",
        ),
    ],
)
@click.argument("topic")
@click.option(
    "--key-separator",
    metavar="TEXT",
    callback=not_empty,
    help="Separator between key and value of a line, \\t for a tab; default: no keys.",
)
@click.option(
    "--null",
    metavar="TEXT",
    help=f"A key or value equal to this text is sent as null; by default none is. `consume` prints null as {_NULL}.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="A line is a JSON object as `consume --format json` prints it. It must have value or value_base64; key, "
    "headers, partition and timestamp_us may be left out; topic and offset are ignored.",
)
@click.option(
    "-H",
    "--header",
    "more_headers",
    multiple=True,
    metavar="NAME=VALUE",
    callback=headers,
    help="A header of each record, after those of its JSON; repeatable.",
)
@click.option(
    "--partition", type=click.IntRange(0), help="Send all records to this partition; overrides the partition in JSON."
)
@click.option("--config", multiple=True, metavar="NAME=VALUE", callback=pairs, help="A producer setting; repeatable.")
@click.option("-q", "--quiet", is_flag=True, help="Do not print how many records were sent.")
@bootstrap_option
def produce(
    topic: str,
    key_separator: str | None,
    null: str | None,
    as_json: bool,
    more_headers: list[tuple[str, str]],
    partition: int | None,
    config: dict[str, Any],
    quiet: bool,
    bootstrap: str,
) -> None:
    """Send each line of standard input to TOPIC as a record.

    Prints the number of sent records on stderr. After a failure or Ctrl-C it prints which lines are acknowledged; to
    continue, send the other lines. While standard input is a pipe, the first Ctrl-C, SIGTERM or SIGHUP does not
    end the command: it sends all lines up to the end of the pipe, because its writer may count them as done. The second
    ends it at once. After a failure it reads and sends no more lines, and prints how many of those that it read from a
    pipe may be missing. If they come directly from `kafkalog consume TOPIC --group GROUP`, the group continues after
    them: move it back by that many, with `kafkalog groups reset GROUP --topic TOPIC --shift-by -N`. This moves each
    partition, so some records are sent again. With another command between the two, more lines may be missing.
    """
    from kafkalog.client.config import parse_producer
    from kafkalog.client.producer.producer import Producer

    if as_json and (key_separator is not None or null is not None):
        raise click.UsageError("--json has fields for keys and nulls: leave out --key-separator and --null")
    record_of: Callable[[bytes, int], _Record] = _from_json
    if not as_json:
        separator = None if key_separator is None else key_separator.replace("\\t", "\t").encode()
        record_of = functools.partial(_from_line, separator=separator, null=None if null is None else null.encode())
    added = tuple((name, value.encode()) for name, value in more_headers)
    parse_producer(config)  # names a wrong setting; the Producer has other arguments beside the settings
    failures: list[BaseException] = []
    acknowledged = _Acknowledged()
    lines = LineReader(sys.stdin.fileno())

    def delivered(number: int, error: BaseException | None, metadata: RecordMetadata | None) -> None:
        if error is None:
            acknowledged.add(number)
        else:
            failures.append(_in_line(number, error) if isinstance(error, _OF_THE_RECORD) else error)
            lines.stop()

    watched = sys.stderr.isatty() and not sys.stdin.isatty()
    number = 0
    try:
        # The pipe first: its writer may end, and count its lines as done, while this waits for a broker.
        with lines, _reading_a_pipe_to_its_end(lines):
            with admin_of(bootstrap) as admin:
                [described] = admin.describe_topics([topic])  # a wrong name fails before the first line is read
                if partition is not None:
                    described.partition(partition)
            with (
                progress("records sent", watched=watched) as advance,
                Producer(bootstrap, **config) as producer,
            ):
                for number, line in enumerate(lines, 1):
                    record = record_of(line, number)
                    try:
                        producer.send(
                            topic,
                            record.value,
                            record.key,
                            partition=record.partition if partition is None else partition,
                            timestamp_us=record.timestamp_us,
                            headers=record.headers + added,
                            on_delivery=functools.partial(delivered, number),
                        )
                    except _OF_THE_RECORD as error:
                        raise _in_line(number, error) from None
                    if number % _COUNT_EVERY == 0:
                        advance(_COUNT_EVERY)
                producer.flush()
        if failures:
            raise failures[0]
    except (Exception, KeyboardInterrupt) as error:  # the producer is closed: no further line is acknowledged
        error.add_note(str(acknowledged))
        if is_pipe(sys.stdin) and lines.count > acknowledged.first:
            after = lines.count - acknowledged.first
            error.add_note(f"the last {after} of {counted(lines.count, 'line')} read from the pipe may be missing")
        raise
    if not quiet:
        click.echo(f"sent {counted(number, 'record')} to {topic}", err=True)


@contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[list[signal.Signals]]:
    """Have the signals that end a command (Ctrl-C, SIGTERM, SIGHUP) call a handler. Yields those that do."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ours = [each for each in ending if in_main_thread and signal.getsignal(each) is signal.default_int_handler]
    try:
        for each in ours:
            signal.signal(each, handler)
        yield ours
    finally:
        for each in ours:
            signal.signal(each, signal.default_int_handler)


@contextmanager
def _reading_a_pipe_to_its_end(lines: LineReader) -> Iterator[None]:
    """While standard input is a pipe: the first signal to end, which all commands of a pipeline get, is left to those
    that write into it. The second interrupts, unless it is SIGHUP: a terminal that closes sends several."""
    if not is_pipe(sys.stdin):
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else lines.interrupt)
        with suppress(OSError):  # the terminal is closed
            # Not by click: the signal may have come amid a write to the same buffer.
            os.write(2, b"kafkalog: reading what is in the pipe to its end; another Ctrl-C ends at once\n")

    with _signals_to(first) as ours:
        yield


class _Acknowledged:
    """Which lines of the input are acknowledged, as a sentence. Each partition has an order of its own, so there may be
    gaps. Thread-safe, because a producer calls back on several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both
        self._first = 0
        self._beyond: set[int] = set()  # the others: at most those in flight, unless a partition fails

    def add(self, number: int) -> None:
        with self._lock:
            self._beyond.add(number)
            while self._first + 1 in self._beyond:
                self._first += 1
                self._beyond.remove(self._first)

    @property
    def first(self) -> int:
        """How many lines are, from the first one on without a gap."""
        with self._lock:
            return self._first

    def __str__(self) -> str:
        with self._lock:
            first, beyond = self._first, len(self._beyond)
        lines = f"{counted(first + beyond, 'line')} {'is' if first + beyond == 1 else 'are'} acknowledged"
        if not beyond:
            return {0: "no line is acknowledged", 1: "the first line is acknowledged"}.get(first, f"the first {lines}")
        return f"{lines}, but not the first" if not first else f"{lines}, the first {first} of the input among them"


_OF_THE_RECORD = (RecordTooLarge, BatchTooLarge, UnknownPartition, InvalidArgument)
"""Failures for which it matters which line it was."""


def _in_line(number: int, error: BaseException | str) -> InvalidArgument:
    return InvalidArgument(reason=f"line {number} of the input: {error}")


def _from_line(line: bytes, number: int, separator: bytes | None, null: bytes | None) -> _Record:
    """The record of a plain line: its value, or key and value. Raises InvalidArgument."""
    key: bytes | None = None
    value = line
    if separator is not None:
        key, found, value = line.partition(separator)
        if not found:
            raise InvalidArgument(reason=f"line {number} of the input has no key separator {separator.decode()!r}")
    return _Record(None if value == null else value, None if key == null else key)


_FIELDS = (
    "topic", "partition", "offset", "timestamp_us", "key", "key_base64", "value", "value_base64", "headers",
)  # fmt: skip


def _from_json(line: bytes, number: int) -> _Record:
    """The record of a line as `_json_line` makes it. Raises InvalidArgument."""
    try:
        told = _object(line)
        for name in told:
            if name not in _FIELDS:
                raise ValueError(f"there is no field '{name}'{nearest_hint(name, _FIELDS)}")
        if "value" not in told and "value_base64" not in told:
            raise ValueError("it has no value; a tombstone's is null")
        partition, timestamp = _whole_number(told, "partition"), _whole_number(told, "timestamp_us")
        return _Record(_data(told, "value"), _data(told, "key"), partition, timestamp, _headers(told))
    except ValueError as error:
        raise _in_line(number, str(error)) from None


def _object(line: bytes) -> dict[str, Any]:
    """A JSON object. Bytes in it that are not UTF-8 become surrogates, which `_encoded` refuses. Raises ValueError."""
    try:
        told = json.loads(line.decode("utf-8-sig", "surrogateescape"))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:  # Python's limit of digits
        raise ValueError("a number in it has too many digits") from None
    if not isinstance(told, dict):
        raise ValueError("it is no JSON object")
    return told


def _data(told: Mapping[str, Any], name: str, of: str = "") -> bytes | None:
    """The bytes of a field, the inverse of `as_text`. Raises ValueError.

    Args:
        of: what has the field, if not the record.
    """
    text = told.get(name)
    if name in told and f"{name}_base64" in told:
        raise ValueError(f"it has {name} and {name}_base64: give one of them")
    if f"{name}_base64" in told:
        encoded = told[f"{name}_base64"]
        try:
            return base64.b64decode(encoded, validate=True)
        except (TypeError, ValueError):
            raise ValueError(f"{name}_base64 is no base64: {json_line(encoded)}") from None
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name} must be a text or null, not {json_line(text)}; JSON within it stands in quotes")
    return None if text is None else _encoded(text, f"{of}{name}", f"; give its bytes as {name}_base64")


def _encoded(text: str, what: str, otherwise: str = "") -> bytes:
    """The text as UTF-8. Raises ValueError."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        wrong = text[error.start]
    if "\udc80" <= wrong <= "\udcff":
        raise ValueError(f"{what} has the byte 0x{ord(wrong) - 0xDC00:02x}, which is not UTF-8{otherwise}")
    raise ValueError(f"{what} has the lone surrogate \\u{ord(wrong):04x}, which UTF-8 cannot encode{otherwise}")


def _headers(told: Mapping[str, Any]) -> tuple[tuple[str, bytes | None], ...]:
    """The inverse of `headers_as_text`. Raises ValueError."""
    listed = told.get("headers", [])
    if not isinstance(listed, list) or not all(
        isinstance(each, dict) and isinstance(each.get("key"), str) and each.keys() <= {"key", "value", "value_base64"}
        for each in listed
    ):
        raise ValueError('headers must be like [{"key": "name", "value": "text"}], or with value_base64')
    for each in listed:
        _encoded(each["key"], "a header's key")
    return tuple((each["key"], _data(each, "value", "a header's ")) for each in listed)


def _whole_number(told: Mapping[str, Any], name: str) -> int | None:
    number = told.get(name)
    if number is not None and type(number) is not int:
        raise ValueError(f"{name} must be a whole number, not {json_line(number)}")
    return number


def _place(context: click.Context, parameter: click.Parameter, text: str | None) -> str | int | None:
    """An offset, `earliest` or `latest`."""
    if text is None or text in ("earliest", "latest"):
        return text
    if not text.isascii() or not text.isdecimal():
        raise click.BadParameter(f"expected an offset from 0, earliest or latest, not '{text}'", context, parameter)
    return int(text)


def _expression(context: click.Context, parameter: click.Parameter, text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise click.BadParameter(f"'{text}' is not a regular expression: {error}", context, parameter) from None


@click.command(
    cls=Command,
    examples=[
        ("New records, until Ctrl-C", "kafkalog consume flights"),
        ("All records, with keys", "kafkalog consume flights --from-beginning --exit-at-end --format key-value"),
        (
            "Ten records of a partition, from an offset on",
            "kafkalog consume flights --partition 0 --offset 99 --max-messages 10",
        ),
        (
            "Records of two topics since noon",
            "kafkalog consume flights delays --timestamp 2013-06-01T12:00 --exit-at-end",
        ),
        ("Every topic whose name begins with flights, as JSON", "kafkalog consume --pattern 'flights.*' --format json"),
        ("Share the topic with others of a group", "kafkalog consume flights --group readers --from-beginning"),
        ("The next three records of a group", "kafkalog consume flights --group readers --max-messages 3"),
    ],
)
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--pattern",
    metavar="REGEX",
    callback=_expression,
    help="Instead of TOPICs: all topics whose whole name matches and that exist at the start; with --group also those "
    "that are created later, for which it waits if there is none.",
)
@click.option(
    "--partition",
    "numbers",
    type=click.IntRange(0),
    multiple=True,
    help="Only this one; repeatable. With --pattern: of topics that have it. Not with --group.",
)
@click.option(
    "--from-beginning",
    is_flag=True,
    help="Start at the oldest record; default: show only new records. With --group, used only where the group has no"
    " committed offset.",
)
@click.option(
    "--offset", "place", metavar="N|earliest|latest", callback=_place, help="Start at this offset in each partition."
)
@click.option(
    "--timestamp",
    "since_us",
    metavar="TIME",
    callback=timestamp_us,
    help="Start at the first record at or after this time: ISO-8601 (UTC unless a zone is given) or milliseconds "
    "since 1970; at the end of a partition without such a record.",
)
@click.option(
    "--exit-at-end",
    is_flag=True,
    help="Stop at each partition's end as it was when the command started; with --group, when the group assigned the "
    "partition to it.",
)
@click.option(
    "--max-messages", type=click.IntRange(1), help="Stop after this many records; default: continue until interrupted."
)
@click.option(
    "--group",
    callback=not_empty,
    help="Join this group, whose members share the partitions. Continues at the group's committed offsets, and commits "
    "the records that were shown. Takes precedence over --from-beginning; cannot be combined with --partition, "
    "--offset or --timestamp. Records written into a pipe are committed once its reader has read them: for three "
    "records give --max-messages 3, because `| head -3` reads thousands to show three. The command ends only when its "
    "reader has read them, or has ended; a second Ctrl-C ends it at once. Records that a reader has not read "
    "when their partition goes to another member are shown again by that one. If the reader fails after it has read "
    "them, end all members and move the group back with `kafkalog groups reset GROUP --topic TOPIC --shift-by -N`.",
)
@click.option(
    "--format",
    "layout",
    type=click.Choice(["value", "key-value", "json"]),
    default="value",
    show_default=True,
    help="Format of a line: the value; key, tab, value; or the whole record as JSON with headers, bytes that are not"
    " UTF-8 in base64 (value_base64).",
)
@click.option("--headers", "with_headers", is_flag=True, help="Begin plain lines with NAME=VALUE,NAME=VALUE and a tab.")
@click.option(
    "--null",
    metavar="TEXT",
    help=f"Text for null in plain lines; default: {_NULL}. Give `produce` the same.",
)
@bootstrap_option
def consume(
    topics: tuple[str, ...],
    pattern: re.Pattern[str] | None,
    numbers: tuple[int, ...],
    from_beginning: bool,
    place: str | int | None,
    since_us: int | None,
    exit_at_end: bool,
    max_messages: int | None,
    group: str | None,
    layout: str,
    with_headers: bool,
    null: str | None,
    bootstrap: str,
) -> None:
    """Show the records of TOPICs, one a line, in order per partition.

    A partition that cannot be read, because it is lost or its broker is away, is skipped and reported on stderr. The
    exit code is then 1. With --group it is not skipped for good: while the command runs, it looks every few seconds
    whether the partition is served again, reports on stderr when it is, and reads on; the exit code is then 0.

    Ctrl-C, SIGTERM and SIGHUP end the command well. A script ends one that it started with `&` by SIGTERM, as `kill`
    sends it: the shell lets such a command ignore SIGINT.
    """
    from kafkalog.client.consumer.consumer import Consumer

    if bool(topics) == (pattern is not None):
        raise click.UsageError("say what to read: TOPICs, or a --pattern for their names")
    if layout == "json" and null is not None:
        raise click.UsageError("--format json shows null as JSON does: leave out --null")
    if group and numbers:
        raise click.UsageError("--group assigns the partitions to the group's members: leave out --partition")
    start = _start(from_beginning, place, since_us, group, exit_at_end)
    as_line = _line_of(layout, with_headers, (_NULL if null is None else null).encode())
    settings: dict[str, Any] = {}
    if group:
        settings = {"auto_offset_reset": "earliest" if from_beginning else "latest", "enable_auto_commit": False}
    with admin_of(bootstrap) as admin, Consumer(bootstrap, group, **settings) as consumer:
        wanted = _wanted(admin, topics, pattern, numbers, may_be_none=bool(group) and not exit_at_end)
        showing = _Showing(admin, consumer, as_line, exit_at_end, group, from_beginning=from_beginning)
        if group:
            _say_start(admin, group, wanted, from_beginning=from_beginning, exit_at_end=exit_at_end)
            showing.subscribe(topics if pattern is None else pattern, wanted)
            if not wanted and pattern is not None:
                click.echo(f"kafkalog: {_no_match(pattern)} yet: waiting for one", err=True)
        else:
            showing.assign(dict.fromkeys(wanted, start))
        with _signals_to(showing.interrupt):
            showing.show(max_messages)
    if showing.has_failed:
        raise click.exceptions.Exit(1)


class _Showing:
    """Writes what a consumer reads to stdout, a line each. As a member of a group it commits what is written; into a
    pipe, what its reader has read.

    Args:
        stops_at_end: whether to stop at each partition's end, as it is when the consumer gets the partition.
        group: None: the partitions are assigned, and nothing is committed.
        from_beginning: the group begins at the start, so its start is committed before anything is shown.
    """

    def __init__(
        self,
        admin: Admin,
        consumer: Consumer,
        as_line: Callable[[Message], bytes],
        stops_at_end: bool,
        group: str | None,
        *,
        from_beginning: bool,
    ) -> None:
        self._admin = admin
        self._consumer = consumer
        self._as_line = as_line
        self._stops_at_end = stops_at_end
        self._group = group
        self._from_beginning = from_beginning
        self._pipe = WrittenPipe(sys.stdout.fileno()) if is_pipe(sys.stdout) else None
        out = sys.stdout.buffer
        # With PYTHONUNBUFFERED it is raw: a write that a signal interrupts would end amid the line.
        is_raw = isinstance(out, io.RawIOBase)
        self._out = (
            io.BufferedWriter(self._pipe) if self._pipe
            else open(out.fileno(), "wb", closefd=False) if is_raw  # noqa: SIM115
            else out
        )  # fmt: skip
        self._shown = self._looked_at = 0
        self._look_due = 0.0
        self._interrupts = 0
        self._is_hung_up = False  # by SIGHUP, and nothing else has come yet
        self._is_writing = self._is_finishing = self._is_over = False
        self._ends: dict[TopicPartition, int] = {}
        self._reading: set[TopicPartition] = set()  # without those that are at their end
        self._left_out: dict[TopicPartition, KafkalogError] = {}
        self._failed: set[TopicPartition] = set()  # were left out, and this has not read on in them
        self._look: Future[Any] | None = None  # the result of `readable`
        self._look_again_at = 0.0
        # Also of partitions without a record shown, or the next run would start at their ends.
        self._read = ReadLines(self._pipe)
        self._unread = 0

    @property
    def has_failed(self) -> bool:
        """Whether a partition could not be read, and was left out."""
        return bool(self._failed)

    def assign(self, starts: Mapping[TopicPartition, str | int | AtTimestamp]) -> None:
        """Read those of these partitions that are served."""
        extents, failed = readable(self._admin, starts)
        self._consumer.assign({partition: starts[partition] for partition in extents})
        if self._stops_at_end:  # now the consumer fails if a topic is created again, with other ends
            extents, away = readable(self._admin, extents)
            failed |= away
        self._begin(extents, failed)

    def subscribe(self, topics: Iterable[str] | re.Pattern[str], partitions: Iterable[TopicPartition]) -> None:
        """Read what the group assigns of these partitions, and of those that come."""
        _, failed = readable(self._admin, partitions)  # their starts may not be known, so they may never be assigned
        self._leave_out(failed)
        self._consumer.subscribe(
            topics, on_assigned=self._assigned, on_revoked=self._revoked, on_lost=lambda _, lost: self._forget(lost)
        )

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if self._is_finishing:
            consumer.pause(partitions)
            return
        found = readable(self._admin, partitions, without_gone=True)  # the group hears of a deleted topic
        self._begin_assigned(*found)

    def _begin_assigned(
        self, extents: Mapping[TopicPartition, PartitionExtent], failed: dict[TopicPartition, KafkalogError]
    ) -> None:
        """Read partitions that the group has assigned, without those that failed."""
        for partition, (start, end, _size) in extents.items():
            position = self._consumer.position(partition)
            if not start <= position <= end:  # where to go on is for the user to say
                failed[partition] = OffsetOutOfRange(
                    offset=position, partition=str(partition), start_offset=start, end_offset=end
                )
        self._begin({partition: extent for partition, extent in extents.items() if partition not in failed}, failed)
        if self._has_begun():
            self._commit_offsets({p: at for p, at in self._read.offsets.items() if p in extents})

    def _revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        """Who reads them next begins at the last commit: also where nothing was shown, or it would begin at the end."""
        if self._is_over:
            return
        if self._pipe is None:  # a pipe may be full
            self._flush()
        self._read.look()
        offsets = {p: at for p, at in self._read.offsets.items() if p in partitions}
        self._forget(partitions)  # first: after Ctrl-C the others are committed
        self._commit_offsets(offsets)

    def _begin(
        self, extents: Mapping[TopicPartition, PartitionExtent], failed: Mapping[TopicPartition, KafkalogError]
    ) -> None:
        """Read partitions that the consumer has got, or read on, without those that failed."""
        for partition, extent in extents.items():
            if partition not in self._read.offsets:  # in a pipe may be lines before its position
                self._ends[partition] = extent.end_offset
                self._read.offsets[partition] = self._consumer.position(partition)
            self._left_out.pop(partition, None)
            if partition in self._failed:
                self._failed.remove(partition)
                click.echo(f"kafkalog: {partition} is served again", err=True)
        self._reading.update(extents)
        self._consumer.resume(extents)
        self._leave_out(failed)
        if self._stops_at_end:
            self._stop_reading([p for p in extents if self._read.offsets[p] == self._ends[p]])

    def _leave_out(self, failed: Mapping[TopicPartition, KafkalogError]) -> None:
        for partition, error in failed.items():
            if partition not in self._failed or not isinstance(error, _MAY_PASS):
                say_failure(partition, error)
        self._failed.update(failed)
        self._left_out.update(failed)
        self._look_again_at = time.monotonic() + _LOOK_SECONDS
        self._stop_reading(failed)

    def _look_again(self) -> None:
        """In a group, read on in partitions that are served again: nobody else reads them. The look is made in a
        thread, because a broker that hangs would hold up the others' records."""
        if self._look is None:
            if self._group is None or time.monotonic() < self._look_again_at:
                return
            away = [p for p in self._consumer.assignment() if isinstance(self._left_out.get(p), _MAY_PASS)]
            if away:
                self._look = in_background(functools.partial(readable, self._admin, away))
        elif self._look.done():
            look, self._look, self._look_again_at = self._look, None, time.monotonic() + _LOOK_SECONDS
            # No broker answers; or a topic was deleted, or the lease has ended, and a callback takes them away next.
            with suppress(KafkalogError):
                extents, _ = look.result()
                self._begin_assigned({p: extent for p, extent in extents.items() if p in self._left_out}, {})

    def _stop_reading(self, partitions: Collection[TopicPartition]) -> None:
        self._reading.difference_update(partitions)
        self._consumer.pause([p for p in self._consumer.assignment() if p in partitions])

    def _forget(self, partitions: Collection[TopicPartition]) -> None:
        """The consumer does not have these any more."""
        self._reading.difference_update(partitions)
        self._left_out = {p: error for p, error in self._left_out.items() if p not in partitions}
        self._read.forget(partitions)

    def _goes_on(self) -> bool:
        """Whether a partition is to be read on, or may come."""
        if self._reading:
            return True
        if self._group is None:
            return False
        awaited = self._consumer.awaited()
        if awaited is None or awaited - self._left_out.keys():
            return True
        share = awaited.union(self._consumer.assignment())
        errors = [error for partition, error in self._left_out.items() if partition in share]
        return not self._stops_at_end and (not errors or any(isinstance(error, _MAY_PASS) for error in errors))

    def show(self, max_messages: int | None) -> None:
        """Show records until the ends, the number of records, or Ctrl-C.

        Raises:
            BrokenPipeError: the reader is gone; what it has read is committed.
        """
        try:
            try:
                self._show_all(max_messages)
                self._finish()
            except KeyboardInterrupt:  # the normal end, unless it is the second
                if self._interrupts > 1:
                    raise
                self._finish()
            except KafkalogError:  # reported at once, so without a wait for the reader
                with suppress(KafkalogError):
                    self._flush()
                    self._commit()
                raise
        except OSError:  # the reader is gone, or a pipe that must not block is full
            if self._pipe:  # of anything else it is not known how much of the buffer was written
                self._commit()
                self._say_reader_ended(self._pipe)
            self._discard_output()
            raise
        finally:
            self._is_over = True

    def _show_all(self, max_messages: int | None) -> None:
        waits = False
        while self._goes_on() and not self._interrupts and (max_messages is None or self._shown < max_messages):
            before = self._shown
            try:
                if waits:
                    self._show_some(1, _IDLE_SECONDS)
                else:
                    self._show_some(None if max_messages is None else max_messages - before, 0.0)
            except KafkalogError as error:
                self._flush()
                self._leave_out(self._failures(error))
            self._flush()
            self._look_again()
            was_idle, waits = waits, self._shown == before
            is_due = (was_idle and waits) or time.monotonic() >= self._look_due
            if is_due and (self._shown > self._looked_at or self._unread):
                self._commit_for_now()
            if waits and self._pipe and not self._pipe.has_reader():
                raise BrokenPipeError

    def _finish(self) -> None:
        """The last commit: who reads the pipe reads all of it, or goes away."""
        self._flush()
        if self._group is not None and self._pipe:
            self._is_finishing = True
            self._stop_reading(self._consumer.assignment())  # also what was let go as Ctrl-C came
            self._pipe.wait_until_read(self._hand_over)
        self._commit()
        if self._pipe:
            self._say_reader_ended(self._pipe)

    def _say_reader_ended(self, pipe: WrittenPipe) -> None:
        """Report where the group is when its reader ended before the command: `head -3` reads all that a pipe holds."""
        read = self._shown - self._unread
        if self._group is not None and read and not self._interrupts and not pipe.has_reader():
            click.echo(
                f"kafkalog: the reader of the pipe has ended, and group {self._group} goes on after the "
                f"{counted(read, 'record')} that it read, shown or not; --max-messages stops after an exact number",
                err=True,
            )

    def _hand_over(self) -> None:
        """Let other members have the partitions that they are to read; the consumer calls back where it is asked."""
        shown = next(self._consumer.messages(timeout=0.0), None)
        assert shown is None, "every partition is paused"

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler: the first lets a line be written whole, which the reader would take for a record. The
        second ends at once, also if the reader does not read. A closing terminal sends SIGHUP several times, and after
        a Ctrl-C too, so that is never the second; nor is what follows it, because Python calls the handlers of signals
        that came together in the order of their numbers."""
        if self._interrupts and (number == signal.SIGHUP or self._is_hung_up):
            self._is_hung_up = self._is_hung_up and number == signal.SIGHUP
            return
        self._is_hung_up = number == signal.SIGHUP
        self._interrupts += 1
        if self._interrupts > 1:
            self._discard_output()
        elif self._is_writing:
            return
        raise KeyboardInterrupt

    def _discard_output(self) -> None:
        """What is left in the buffer is written when Python ends, and must neither fail nor wait."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())

    def _flush(self) -> None:
        self._is_writing = True
        self._out.flush()
        self._is_writing = False

    def _show_some(self, left: int | None, timeout: float) -> None:
        """Show the records that have arrived, or arrive within a timeout after each."""
        read, ends = self._read, self._ends
        for message in self._consumer.messages(max_messages=left, timeout=timeout):
            line, partition = self._as_line(message), TopicPartition(message.topic, message.partition)
            self._is_writing = True
            self._out.write(line)
            if self._group is not None:
                read.add(len(line), partition, message.offset + 1)
            self._shown += 1
            self._is_writing = False
            if self._shown - self._looked_at >= _COMMIT_EVERY or time.monotonic() >= self._look_due:
                self._flush()
                self._commit_for_now()
                self._look_again()
            if self._interrupts:
                return
            if self._stops_at_end and message.offset + 1 >= ends[partition]:
                self._stop_reading([partition])
                if not self._reading:
                    return

    def _commit_for_now(self) -> None:
        """As `_commit`, if a broker and ZooKeeper can be reached; if not, a later one counts."""
        with suppress(RetriableError):
            self._commit()

    def _commit(self) -> None:
        """Commit what is read. Everything is flushed, or cannot be."""
        if self._group is not None:
            self._unread = self._read.look()
            if self._has_begun():
                self._commit_offsets(self._read.offsets)
        self._looked_at, self._look_due = self._shown, time.monotonic() + _COMMIT_SECONDS

    def _has_begun(self) -> bool:
        """Whether the group is to have offsets. One that is to start at the ends, and was shown nothing until Ctrl-C,
        gets none: the next call may choose another start. A job that runs again and again with `--exit-at-end` begins
        where its first run ended."""
        return self._from_beginning or self._stops_at_end or self._shown > 0

    def _commit_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        from kafkalog.client.groups import commit_living

        if offsets:
            with suppress(NotOwner, UnknownMember, MemberFenced):  # the lease has ended: `on_lost` is called next
                commit_living(self._consumer.commit, offsets)

    def _failures(self, error: KafkalogError) -> dict[TopicPartition, KafkalogError]:
        """The partitions that failed. Raises the error if it is not theirs, or the topic is gone."""
        found = {partition: each for partition, each in self._consumer.failures().items() if each is error}
        if not found or isinstance(error, UnknownTopic | UnknownTopicId):
            raise error
        return found


def _start(
    from_beginning: bool, place: str | int | None, since_us: int | None, group: str | None, exit_at_end: bool
) -> str | int | AtTimestamp:
    """Where to start in each partition. Raises click.UsageError if options contradict each other."""
    from kafkalog.client.admin import AtTimestamp

    given = {"--from-beginning": from_beginning, "--offset": place is not None, "--timestamp": since_us is not None}
    chosen = [name for name, is_given in given.items() if is_given]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} say different places to start: give one of them")
    if group and chosen and not from_beginning:
        raise click.UsageError(
            f"--group starts where the group has committed, and {chosen[0]} elsewhere: leave one of them out, or set "
            "the group there with `kafkalog groups reset`"
        )
    if exit_at_end and not group and (not chosen or place == "latest"):
        raise click.UsageError(
            "--exit-at-end shows nothing from the end on: give --from-beginning, --offset, --timestamp or --group"
        )
    if since_us is not None:
        return AtTimestamp(since_us)
    return place if place is not None else "earliest" if from_beginning else "latest"


def _say_start(
    admin: Admin, group: str, wanted: Iterable[TopicPartition], *, from_beginning: bool, exit_at_end: bool
) -> None:
    """Report that nothing may be shown because of where the group begins."""
    try:
        described = admin.describe_group(group)
        has_offsets = any(partition in described.offsets for partition in wanted)
        is_live = bool(described.members)
    except UnknownGroup:
        has_offsets = is_live = False
    if exit_at_end and not from_beginning and not has_offsets:
        click.echo(
            f"kafkalog: group {group} has no offset in these topics: it begins at the end (--from-beginning begins at "
            "the start)",
            err=True,
        )
    elif from_beginning and has_offsets and not is_live:  # of a live group it is one more member
        click.echo(
            f"kafkalog: --from-beginning is not used where group {group} has offsets (kafkalog groups reset {group} "
            "--to earliest)",
            err=True,
        )


def _wanted(
    admin: Admin,
    topics: Iterable[str],
    pattern: re.Pattern[str] | None,
    numbers: Iterable[int],
    *,
    may_be_none: bool = False,
) -> list[TopicPartition]:
    """The partitions to show; of topics that match a pattern, those that exist.

    Args:
        may_be_none: whether topics that match the pattern may come later.

    Raises:
        UnknownTopic, UnknownPartition: of topics that are named.
        InvalidArgument: no topic matches the pattern, or no matching topic has such a partition.
    """
    if pattern is None:
        return [
            TopicPartition(topic.name, partition.partition)
            for topic in admin.describe_topics(dict.fromkeys(topics))
            for partition in (map(topic.partition, dict.fromkeys(numbers)) if numbers else topic.partitions)
        ]
    listed = [topic for topic in admin.topics() if pattern.fullmatch(topic.name)]
    if not listed and not may_be_none:
        raise InvalidArgument(reason=_no_match(pattern))
    wanted = [
        TopicPartition(topic.name, partition.partition)
        for topic in listed
        for partition in topic.partitions
        if not numbers or partition.partition in numbers
    ]
    if listed and not wanted:
        raise InvalidArgument(reason=f"no topic that matches '{pattern.pattern}' has such a partition")
    return wanted


def _no_match(pattern: re.Pattern[str]) -> str:
    return f"no topic name matches the whole of '{pattern.pattern}'"


def _line_of(layout: str, with_headers: bool, null: bytes) -> Callable[[Message], bytes]:
    """A function from a record to the line that shows it."""
    if layout == "json":
        return _json_line

    def plain(message: Message) -> bytes:
        value = null if message.value is None else message.value
        if layout == "key-value":
            value = b"%b\t%b" % (null if message.key is None else message.key, value)
        if with_headers:
            pairs = (b"%b=%b" % (name.encode(), null if data is None else data) for name, data in message.headers)
            value = b"%b\t%b" % (b",".join(pairs), value)
        return value + b"\n"

    return plain


def _json_line(message: Message) -> bytes:
    told: dict[str, Any] = {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp_us": message.timestamp_us,
    }
    told |= as_text("key", message.key) | as_text("value", message.value)
    if message.headers:
        told["headers"] = headers_as_text(message.headers)
    return json_line(told).encode() + b"\n"
