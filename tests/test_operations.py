"""docs/OPERATIONS.md has a row for every warning and every error that brokers and clients log, and for no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "OPERATIONS.md").read_text()
_LEVELS = {"warning": "warning", "error": "error", "exception": "error"}
_LOGGERS = ("log", "self._log")
_COMPLAINT = "Complaint"
"""`kafkalog/client/complaints.py`: its event is an argument of its class."""
_CLIENTS = ("kafkalog/client", "kafkalog/aio", "kafkalog/cli")


class Unresolved(Exception):
    """The name of an event is made in a way that this test does not follow."""


def events_in(source: str) -> Iterator[tuple[str, str]]:
    """(event, level) of what a module logs as warning or error."""
    tree = ast.parse(source)
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                assigned.setdefault(ast.unparse(target), []).append(node.value)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id == _COMPLAINT:
            yield from ((event, "warning") for event in _texts(node.args[1], assigned))
        elif levels := _levels(node.func, assigned):
            if ast.unparse(node.args[0]) == "self._event":
                continue  # that of a Complaint
            yield from ((event, level) for event in _texts(node.args[0], assigned) for level in levels)


def _levels(called: ast.expr, assigned: dict[str, list[ast.expr]]) -> set[str]:
    """The levels at which a called function logs; none if it does not, or less than a warning."""
    if isinstance(called, ast.IfExp):
        return _levels(called.body, assigned) | _levels(called.orelse, assigned)
    if isinstance(called, ast.Name):
        return {level for value in assigned.get(called.id, ()) for level in _levels(value, {})}
    if isinstance(called, ast.Attribute) and called.attr in _LEVELS and ast.unparse(called.value) in _LOGGERS:
        return {_LEVELS[called.attr]}
    return set()


def _texts(given: ast.expr, assigned: dict[str, list[ast.expr]]) -> set[str]:
    """The texts that an expression can have."""
    if isinstance(given, ast.Constant):
        return {str(given.value)}
    if isinstance(given, ast.IfExp):
        return _texts(given.body, assigned) | _texts(given.orelse, assigned)
    if values := assigned.get(ast.unparse(given)):
        return {text for value in values for text in _texts(value, assigned)}
    raise Unresolved(f"line {given.lineno}: {ast.unparse(given)}")


def logged(clients: bool) -> set[tuple[str, str]]:
    """What the modules of clients log, or those of brokers."""
    found = set()
    for package in ("broker", "kafkalog"):
        for path in (ROOT / package).rglob("*.py"):
            if str(path.relative_to(ROOT)).startswith(_CLIENTS) == clients:
                found |= set(events_in(path.read_text()))
    return found


def documented(table: str) -> set[tuple[str, str]]:
    """What the page has between its marks for a table."""
    text = PAGE.split(f"<!-- events: {table} -->")[1].split("<!-- end of events -->")[0]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([\w, ]+) \| \S.* \| \S.* \|$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(lines), "a row is not in the form of the table"
    return {
        (event, level)
        for events, levels in rows
        for event in re.findall(r"\w+", events)
        for level in levels.split(", ")
    }


@pytest.mark.parametrize("side", ["broker", "client"])
def test_each_warning_and_error_has_a_row(side: str) -> None:
    found, rows = logged(side == "client"), documented(side)
    assert (found - rows, rows - found) == (set(), set())
    assert len(found) > 10


def test_events_are_found_however_they_are_named() -> None:
    source = """
log.info("told")
log.warning("plain")
event = "one" if empty else "other"
log.error(event, reason="x")
tell = log.warning if known else log.exception
tell("either")
Complaint(log, "first" if new else "later", clock)
"""
    assert set(events_in(source)) == {
        ("plain", "warning"), ("one", "error"), ("other", "error"), ("either", "warning"), ("either", "error"),
        ("first", "warning"), ("later", "warning"),
    }  # fmt: skip
    with pytest.raises(Unresolved, match="line 1: made"):
        list(events_in("log.warning(made(), x=1)"))
