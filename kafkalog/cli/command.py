"""Declarations of command lines: commands with examples, shared options, and the parsing of arguments.

Times, rates, headers and NAME=VALUE pairs are read by click callbacks, so that a wrong one is wrong usage (exit code
2).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
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
    help="gRPC address of one or more brokers, separated by commas; the client finds the other brokers from it.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_SHARED = ("--bootstrap", "--json")
"""Options that may be given before a command's name, also if the command has none of them."""

_OTHERWISE = {
    "a date": range(19000101, 21001232),
    "seconds": range(10**9, 10**11),
    "microseconds": range(10**14, 10**17),
}
"""Numbers that are hardly meant as milliseconds since 1970, and what is."""
_MILLISECONDS_MAX = 10**14
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)(?:/s)?", re.IGNORECASE)


_HELP = ("-h", "--help")
"""Of every command, whoever makes its context: click remembers the option of the first one."""


class Command(click.Command):
    """A command with examples, which --help shows; documents can be made from them.

    Args:
        examples: (description, command line), the simplest first.
    """

    def __init__(self, *arguments: Any, examples: Sequence[tuple[str, str]] = (), **given: Any) -> None:
        super().__init__(*arguments, **given)
        self.examples = examples

    def get_help_option_names(self, context: click.Context) -> list[str]:
        return list(_HELP)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        try:
            rest = super().parse_args(context, args)
        except click.NoSuchOption as error:
            if error.option_name in _SHARED:
                path = context.command_path
                raise click.UsageError(
                    f"`{path}` has no {error.option_name}: leave it out, or see `{path} --help`", context
                ) from None
            raise
        for parameter in self.params:
            if not isinstance(parameter.type, click.Path):
                _check_utf8(context, parameter, context.params.get(parameter.name or ""))
        return rest

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for says, line in self.examples:
                formatter.write_text(f"{says}:")
                formatter.write(
                    f"{'':{formatter.current_indent + formatter.indent_increment}}{line}\n"
                )  # never wrapped


def _check_utf8(context: click.Context, parameter: click.Parameter, value: object) -> None:
    """Refuse arguments that are not UTF-8: the system passes bytes, and Python's text of such bytes cannot be
    encoded."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise click.BadParameter(f"{value!r} is not UTF-8", context, parameter) from None
    elif isinstance(value, dict):
        _check_utf8(context, parameter, list(value.items()))
    elif isinstance(value, list | tuple):
        for each in value:
            _check_utf8(context, parameter, each)


class CommandGroup(click.Group):
    """Commands to which `--bootstrap` and `--json` may be given before their names, too.

    They are passed on to the command, so that a command without such an option refuses them as usual. If an option is
    given in both places, the one after the name counts.
    """

    command_class = Command

    def get_help_option_names(self, context: click.Context) -> list[str]:
        return list(_HELP)

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        shared: click.Command = click.Command(None)
        for option in (json_option, bootstrap_option):
            option(shared)
        for parameter in shared.params:
            parameter.default, parameter.envvar = None, None  # the command's own
            self.params.append(parameter)

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)  # in the order of declaration, not of the alphabet

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(context, args)
        bootstrap, as_json = context.params.pop("bootstrap"), context.params.pop("as_json")
        handed = [*(["--bootstrap", bootstrap] if bootstrap is not None else []), *(["--json"] if as_json else [])]
        context.args = [*handed, *context.args]
        return rest


def confirm(question: str, yes: bool) -> None:
    """Ask before something that cannot be undone, unless `--yes` was given.

    Raises:
        click.ClickException: the answer is no.
        click.UsageError: standard input is not a terminal, so nobody can answer.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Standard input is no terminal, so nobody can be asked: give --yes")
    if not click.confirm(question, err=True):
        raise click.ClickException("nothing was done")


def not_empty(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty text (`--group "$GROUP"` with an empty variable)."""
    if value == "":
        raise click.BadParameter("it must not be empty", context, parameter)
    return value


def pairs(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE arguments as a dict."""
    return {name.strip(): value.strip() for name, value in headers(context, parameter, values)}


def headers(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> list[tuple[str, str]]:
    """NAME=VALUE arguments in their order, unchanged: a name may occur twice, and spaces count."""
    found = []
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"expected NAME=VALUE, not '{text}'", context, parameter)
        found.append((name, value))
    return found


def rate(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """`50MB` as bytes a second."""
    if text is None:
        return None
    found = _RATE.fullmatch(text.strip())
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise click.BadParameter(
            f"'{text}' is no rate: write bytes a second, such as 50MB or 64KiB", context, parameter
        )
    bytes_a_second = int(float(found[1]) * unit)
    if not bytes_a_second and float(found[1]):
        raise click.BadParameter(f"'{text}' is less than a byte a second", context, parameter)
    if bytes_a_second >= 1 << 63:
        raise click.BadParameter(f"'{text}' is more than any disk writes", context, parameter)
    return bytes_a_second


def timestamp_us(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """A time, ISO-8601 or in milliseconds since 1970, as microseconds since 1970."""
    if text is None:
        return None
    if text.strip().isdecimal():
        number = int(text)
        meant = next((what for what, numbers in _OTHERWISE.items() if number in numbers), None)
        if meant or number > _MILLISECONDS_MAX:
            hint = f", but looks like {meant}" if meant else ""
            raise click.BadParameter(
                f"{text.strip()} is read as milliseconds since 1970{hint}: write milliseconds, such as 1370044800000, "
                "or a time, such as 2013-06-01T00:00:00",
                context,
                parameter,
            )
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise click.BadParameter(
            f"'{text}' is no time: write 2013-06-01T12:00:00, or milliseconds since 1970", context, parameter
        ) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    since = moment - datetime.fromtimestamp(0, UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def partitions_named(text: str) -> tuple[str, list[int]]:
    """The topic and partitions of `TOPIC:0,2`; an empty list: all partitions."""
    topic, colon, numbers = text.partition(":")
    if not topic or (colon and not all(number.strip().isdecimal() for number in numbers.split(","))):
        raise click.BadParameter(f"expected TOPIC or TOPIC:0,2, not '{text}'", param_hint="--topic")
    return topic, sorted({int(number) for number in numbers.split(",")}) if colon else []


def merged(named: Iterable[tuple[str, list[int]]]) -> dict[str, list[int]]:
    """The partitions of each topic, from several results of `partitions_named`; an empty list: all partitions."""
    found: dict[str, list[int]] = {}
    for topic, numbers in named:
        every = not numbers or found.get(topic) == []
        found[topic] = [] if every else sorted({*found.get(topic, []), *numbers})
    return found
