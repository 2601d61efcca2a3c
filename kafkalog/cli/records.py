"""`kafkalog produce` and `consume`: lines of text in, records out. Bytes go through as they are, but for JSON."""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kafkalog.cli.output import (
    admin_of,
    as_text,
    bootstrap_option,
    counted,
    headers_as_text,
    not_empty,
    pairs,
    progress,
    say_failure,
)
from kafkalog.errors import (
    BatchTooLarge,
    InvalidArgument,
    KafkalogError,
    RecordTooLarge,
    UnknownTopic,
    UnknownTopicId,
)

if TYPE_CHECKING:
    from kafkalog.records import Message, RecordMetadata, TopicPartition

_COUNT_EVERY = 1000
_COMMIT_EVERY = 10_000
_IDLE_SECONDS = 0.2


@click.command()
@click.argument("topic")
@click.option(
    "--key-separator",
    metavar="TEXT",
    help="What stands between key and value of a line, \\t for a tab; no keys otherwise.",
)
@click.option("--partition", type=click.IntRange(0), help="Send all to this partition.")
@click.option("--config", multiple=True, metavar="NAME=VALUE", callback=pairs, help="A producer setting; repeatable.")
@bootstrap_option
def produce(
    topic: str, key_separator: str | None, partition: int | None, config: dict[str, Any], bootstrap: str
) -> None:
    """Send each line of standard input to TOPIC as a record.

    A failure, or the end by Ctrl-C, says which lines are acknowledged: to go on, give the input from there.
    """
    from kafkalog.client.config import parse_producer
    from kafkalog.client.producer.producer import Producer

    if key_separator == "":
        raise click.BadParameter("it must not be empty", param_hint="--key-separator")
    separator = None if key_separator is None else key_separator.replace("\\t", "\t").encode()
    parse_producer(config)  # names the wrong one; the Producer takes arguments of its own beside the settings
    failures: list[BaseException] = []
    acknowledged = _Acknowledged()

    def delivered(number: int, error: BaseException | None, metadata: RecordMetadata | None) -> None:
        if isinstance(error, _OF_THE_RECORD):
            failures.append(_in_line(number, error))
        elif error is not None:
            failures.append(error)
        else:
            acknowledged.add(number)

    watched = sys.stderr.isatty() and not sys.stdin.isatty()
    with admin_of(bootstrap) as admin:
        admin.describe_topics([topic])  # a wrong name is said before the first line was typed
    try:
        with progress("records sent", watched=watched) as advance, Producer(bootstrap, **config) as producer:
            for number, line in enumerate(sys.stdin.buffer, 1):
                key, value = _key_and_value(line.removesuffix(b"\n"), separator, number)
                on_delivery = functools.partial(delivered, number)
                try:
                    producer.send(topic, value, key, partition=partition, on_delivery=on_delivery)
                except _OF_THE_RECORD as error:
                    raise _in_line(number, error) from None
                if number % _COUNT_EVERY == 0:
                    advance(_COUNT_EVERY)
                if failures:
                    break
            producer.flush()
        if failures:
            raise failures[0]
    except (KafkalogError, KeyboardInterrupt) as error:  # the producer is closed: no line is acknowledged from here on
        error.add_note(str(acknowledged))
        raise


class _Acknowledged:
    """Which lines of the input are in the topic, as a sentence. Each partition has an order of its own, so there may be
    gaps. Thread-safe: a producer calls back on several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both
        self._first = 0  # that many from the first on
        self._beyond: set[int] = set()  # the others: no more than are in flight, unless a partition fails

    def add(self, number: int) -> None:
        with self._lock:
            self._beyond.add(number)
            while self._first + 1 in self._beyond:
                self._first += 1
                self._beyond.remove(self._first)

    def __str__(self) -> str:
        with self._lock:
            first, beyond = self._first, len(self._beyond)
        lines = f"{counted(first + beyond, 'line')} {'is' if first + beyond == 1 else 'are'} acknowledged"
        if not beyond:
            return {0: "no line is acknowledged", 1: "the first line is acknowledged"}.get(first, f"the first {lines}")
        return f"{lines}, but not the first" if not first else f"{lines}, the first {first} of the input among them"


_OF_THE_RECORD = (RecordTooLarge, BatchTooLarge)
"""Failures for which it matters which line it was."""


def _in_line(number: int, error: BaseException) -> InvalidArgument:
    return InvalidArgument(reason=f"line {number} of the input: {error}")


def _key_and_value(line: bytes, separator: bytes | None, number: int) -> tuple[bytes | None, bytes]:
    if separator is None:
        return None, line
    key, found, value = line.partition(separator)
    if not found:
        raise InvalidArgument(reason=f"line {number} of the input has no key separator {separator.decode()!r}")
    return key, value


@click.command()
@click.argument("topic")
@click.option(
    "--from-beginning",
    is_flag=True,
    help="Start at the oldest record, else only new ones are shown; with --group, if the group has committed nothing "
    "there yet.",
)
@click.option("--max-messages", type=click.IntRange(1), help="Stop after that many; else go on until interrupted.")
@click.option(
    "--group", callback=not_empty, help="Go on where this consumer group has committed, and commit what was shown."
)
@click.option(
    "--format",
    "layout",
    type=click.Choice(["value", "key-value", "json"]),
    default="value",
    show_default=True,
    help="A line of a record: its value; key, tab, value; or all of it as JSON.",
)
@bootstrap_option
def consume(
    topic: str, from_beginning: bool, max_messages: int | None, group: str | None, layout: str, bootstrap: str
) -> None:
    """Show the records of TOPIC, one a line, in order per partition.

    A partition that cannot be read, such as a lost one, is reported on stderr and skipped; the exit code is then 1.
    """
    from kafkalog.client.consumer.consumer import Consumer
    from kafkalog.records import TopicPartition

    fallback = "earliest" if from_beginning else "latest"
    as_line = _LAYOUTS[layout]
    out = sys.stdout.buffer
    shown = committed = 0
    starts, failed = _starts(bootstrap, topic, "committed" if group else fallback, fallback)
    for partition, error in failed.items():
        say_failure(partition, error)
    with Consumer(bootstrap, group, committed_fallback=fallback) as consumer:
        consumer.assign(starts)
        # What is written, not what was handed out: Ctrl-C may come between the two. And where it began, also in
        # partitions that it has not come to, or the next run would begin at their ends. Only a group that is to begin
        # at the ends, and was shown nothing, has not begun: it may be told to begin elsewhere the next time.
        offsets = {partition.partition: consumer.position(partition) for partition in starts} if group else {}

        def commit() -> int:
            if group and offsets and (shown or from_beginning):
                consumer.commit({TopicPartition(topic, number): offset for number, offset in offsets.items()})
            return shown

        def leave_out(error: KafkalogError) -> None:
            """Go on without the partitions that failed. Raises the error if it is not theirs, or the topic is gone."""
            out.flush()
            found = consumer.failures()
            if not found or isinstance(error, UnknownTopic | UnknownTopicId):
                raise error
            for partition, reason in found.items():
                say_failure(partition, reason)
            failed.update(found)
            consumer.unassign(found)

        try:
            commit()
            while consumer.assignment() and (max_messages is None or shown < max_messages):
                left = None if max_messages is None else max_messages - shown
                try:
                    for message in consumer.messages(max_messages=left, timeout=_IDLE_SECONDS):
                        out.write(as_line(message))
                        offsets[message.partition] = message.offset + 1
                        shown += 1
                        if shown - committed >= _COMMIT_EVERY:
                            out.flush()
                            committed = commit()
                except KafkalogError as error:
                    leave_out(error)
                out.flush()
                if shown > committed:
                    committed = commit()
        except KeyboardInterrupt:  # how it is meant to end
            out.flush()
            commit()
    if failed:
        raise click.exceptions.Exit(1)


def _starts(
    bootstrap: str, topic: str, start: str, fallback: str
) -> tuple[dict[TopicPartition, str], dict[TopicPartition, KafkalogError]]:
    """Where to start in the partitions of a topic that are served; and why the others are not."""
    from kafkalog.records import TopicPartition

    failed: dict[TopicPartition, KafkalogError] = {}
    with admin_of(bootstrap) as admin:
        [description] = admin.describe_topics([topic])
        partitions = [TopicPartition(topic, partition.partition) for partition in description.partitions]
        served = admin.list_offsets(dict.fromkeys(partitions, fallback), failed)
    return dict.fromkeys(served, start), failed


def _value_line(message: Message) -> bytes:
    return (message.value or b"") + b"\n"


def _key_value_line(message: Message) -> bytes:
    return b"%b\t%b\n" % (message.key or b"", message.value or b"")


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
    return json.dumps(told).encode() + b"\n"


_LAYOUTS: dict[str, Callable[[Message], bytes]] = {
    "value": _value_line,
    "key-value": _key_value_line,
    "json": _json_line,
}
