"""The `kafkalog` command: its entry point, and the handling of failures.

A command raises an error, and this module turns it into an exit code: 0 done; 1 a failure, with one sentence on stderr;
2 wrong usage (click's). A traceback is shown only if KAFKALOG_DEBUG is set. Modules of commands import only click and
nothing heavier at the top, so that --help answers at once; a command imports what it needs when it is called.

Other packages contribute commands; `broker` contributes those that run servers. An entry point of the group
`kafkalog.commands` has a command's name and its object.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kafkalog.cli import cluster, doctor, groups, records, topics, transactions
from kafkalog.cli.command import CommandGroup
from kafkalog.errors import KafkalogError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class _ReaderGone(Exception):
    """Standard output was closed by its reader."""


_ORDER = (
    "local", "broker", "zookeeper",
    "cluster", "topics", "produce", "consume", "offsets", "groups", "transactions",
    "log", "doctor",
)  # fmt: skip
"""Of --help: starting a cluster, using it, looking for what is wrong. Other commands come after these."""


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@functools.cache
def _contributed() -> dict[str, EntryPoint]:
    """Commands of other packages by name. Finding them takes 5 ms, and 15 ms for the import of a library."""
    from importlib import metadata

    return {each.name: each for each in metadata.entry_points(group="kafkalog.commands")}


class _Commands(CommandGroup):
    """The commands of this package, and contributed ones, which are loaded on first use."""

    def list_commands(self, context: click.Context) -> list[str]:
        names = {*self.commands, *_contributed()}
        return sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.commands and name in _contributed():
            self.add_command(_contributed()[name].load(), name)
        return super().get_command(context, name)

    def invoke(self, context: click.Context) -> Any:
        try:
            result = super().invoke(context)
            sys.stdout.flush()
            return result
        except BrokenPipeError:  # caught before click, which would make it a failure
            raise _ReaderGone from None


@click.group(cls=_Commands, context_settings={"max_content_width": 100})
@click.version_option(package_name="pyspark-kafkalog", prog_name="kafkalog")
def kafkalog() -> None:
    """A partitioned append-only log for Spark: run a cluster, look into it, write to it and read from it."""


kafkalog.add_command(cluster.cluster)
kafkalog.add_command(topics.topics)
kafkalog.add_command(records.produce)
kafkalog.add_command(records.consume)
kafkalog.add_command(topics.offsets)
kafkalog.add_command(groups.groups)
kafkalog.add_command(transactions.transactions)
kafkalog.add_command(doctor.doctor)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code. Raises nothing except SystemExit of a signal handler."""
    try:
        ended = kafkalog.main(args=arguments, prog_name="kafkalog", standalone_mode=False)
        return ended if isinstance(ended, int) else 0  # click returns the code of an Exit
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.UsageError as error:
        error.show()
        return 2
    except click.ClickException as error:
        return _failed(error, error.format_message())
    except KafkalogError as error:
        return _failed(error, _with_notes(error, str(error)))
    except _ReaderGone:  # `kafkalog consume t | head`: the reader has enough; buffered output is dropped
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    except (click.Abort, KeyboardInterrupt) as interrupt:
        # click turns a KeyboardInterrupt into an Abort; the notes are on the KeyboardInterrupt.
        return _failed(None, _with_notes(interrupt.__cause__ or interrupt, "interrupted"))
    except OSError as error:
        if error.errno in _UNWRITABLE and not error.filename:  # standard output goes to a full disk
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return _failed(error, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        sentence = f"a defect of kafkalog: {type(error).__name__}: {error} (KAFKALOG_DEBUG=1 shows where)"
        return _failed(error, _with_notes(error, sentence))


def _with_notes(error: BaseException, sentence: str) -> str:
    """The sentence, and the notes that a command added to the error, such as its progress."""
    return "; ".join([sentence, *getattr(error, "__notes__", ())])


def _failed(error: BaseException | None, sentence: str) -> int:
    if error is not None and os.environ.get("KAFKALOG_DEBUG"):
        import traceback

        traceback.print_exception(error)
    click.echo(f"kafkalog: {' '.join(sentence.split())}", err=True)
    return 1


def main() -> None:
    """The console script. SIGTERM and SIGHUP end a command like Ctrl-C: lines that were read are sent, and records that
    were shown are committed. Servers have handlers of their own."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the process that started us
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    sys.exit(run())
