"""How command lines are declared: examples, and the arguments that commands read. No cluster."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kafkalog.cli import command
from kafkalog.cli.main import kafkalog

CONTEXT, OPTION = click.Context(click.Command("c")), click.Option(["--option"])


def commands(group: click.Group, *names: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by what is typed."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from commands(found, *names, name)
        else:
            assert found is not None
            yield " ".join([*names, name]), found


COMMANDS = dict(commands(kafkalog, "kafkalog"))


def command_lines(line: str) -> Iterator[list[str]]:
    """The words of each `kafkalog` in a shell's line."""
    words: list[str] = []
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>")
    lexer.whitespace_split = True
    for word in [*lexer, "|"]:
        if word in ("|", "<", ">"):
            if words[:1] == ["kafkalog"]:
                yield words
            words = []
        else:
            words.append(word)


def parse(found: click.Command, name: str, arguments: list[str]) -> str:
    """Parse as a call would, and call nothing. Returns what was typed of commands' names."""
    context = found.make_context(name, arguments)
    if not isinstance(found, click.Group):
        return name
    sub_name, sub, rest = found.resolve_command(context, [*context._protected_args, *context.args])
    assert sub is not None and sub_name is not None
    return f"{name} {parse(sub, sub_name, rest)}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_which_parse_and_are_shown_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = COMMANDS[name]
    assert isinstance(found, command.Command) and found.examples, f"{name} has no example"
    for path in ("conf/broker.properties", "data/broker-0"):  # files that examples name
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    shown = found.get_help(click.Context(found, info_name=name))
    for says, line in found.examples:
        assert f"  {says}:\n    {line}\n" in shown + "\n" and len(line) <= 110
        assert not says.endswith((".", ":")) and says[0].isupper()
        parsed = [parse(kafkalog, "kafkalog", words[1:]) for words in command_lines(line)]
        assert name in parsed, f"'{line}' is no example of {name}"


def test_an_example_that_does_not_parse_is_seen() -> None:
    for line in ("kafkalog topics list --nope", "kafkalog consume --partition x", "kafkalog topics nope"):
        [words] = command_lines(line)
        with pytest.raises(click.UsageError):
            parse(kafkalog, "kafkalog", words[1:])


@pytest.mark.parametrize(
    ("text", "named"),
    [("t", ("t", [])), ("t:0", ("t", [0])), ("t:2,0,2", ("t", [0, 2])), ("a.b:1, 3", ("a.b", [1, 3]))],
)
def test_a_topic_and_its_partitions_are_read(text: str, named: tuple[str, list[int]]) -> None:
    assert command.partitions_named(text) == named


@pytest.mark.parametrize("text", ["", ":0", "t:", "t:-1", "t:0,", "t:x"])
def test_what_names_no_partitions_is_wrong_usage(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected TOPIC or TOPIC:0,2"):
        command.partitions_named(text)


def test_a_setting_is_a_name_and_a_value_without_the_spaces_around() -> None:
    assert command.pairs(CONTEXT, OPTION, [" a = b=c ", "d="]) == {"a": "b=c", "d": ""}
    for text in ("a", "=b"):
        with pytest.raises(click.BadParameter, match=f"expected NAME=VALUE, not '{text}'"):
            command.pairs(CONTEXT, OPTION, [text])


def test_a_header_is_what_was_typed_and_may_be_there_twice() -> None:
    assert command.headers(CONTEXT, OPTION, ["a= b", "a=", "b=c=d"]) == [("a", " b"), ("a", ""), ("b", "c=d")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1500", 1_500_000),
        ("1970-01-02T00:00:01.25", 86_401_250_000),
        ("1970-01-02T00:00:01.25+01:00", 82_801_250_000),
        ("1970-01-01", 0),
        ("1969-12-31T23:59:59.5", -500_000),
    ],
)
def test_a_time_is_utc_unless_it_says_otherwise(text: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert command.timestamp_us(CONTEXT, OPTION, text) == expected
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("20130601", ", but looks like a date"),
        ("1370044800", ", but looks like seconds"),
        ("1370044800000000", ", but looks like microseconds"),
        ("99999999999999999999", ""),
    ],
)
def test_a_number_that_is_hardly_meant_as_milliseconds_is_refused(text: str, meant: str) -> None:
    with pytest.raises(click.BadParameter, match=f"{text} is read as milliseconds since 1970{meant}: write"):
        command.timestamp_us(CONTEXT, OPTION, text)
    assert command.timestamp_us(CONTEXT, OPTION, "1370044800000") == 1_370_044_800_000_000


def test_partitions_of_a_topic_that_is_named_twice_are_all_of_them() -> None:
    named = [("t", [1]), ("u", []), ("t", [0, 1]), ("u", [3]), ("v", [2]), ("v", [])]
    assert command.merged(named) == {"t": [0, 1], "u": [], "v": []}
