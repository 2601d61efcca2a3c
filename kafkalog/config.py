"""Settings, declared once: a `Setting` is one row; parsing, validation, help, conf files and docs are made from it.

Outside, names are dotted (`segment.bytes`); inside, the same words in snake_case (`settings.segment_bytes`). Knows no
particular setting: the broker's and topics' stand in `broker/config.py`, the client's in `kafkalog/client/config.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kafkalog.errors import InvalidSetting, UnknownSetting

Check = Callable[[Any], str | None]
"""Returns what is wrong with a value, or None."""


def at_least(minimum: int) -> Check:
    return lambda value: None if value >= minimum else f"it must be at least {minimum}"


def between(minimum: int, maximum: int) -> Check:
    return lambda value: None if minimum <= value <= maximum else f"it must be from {minimum} to {maximum}"


def one_of(*allowed: Any) -> Check:
    listed = ", ".join(str(value) for value in allowed)
    return lambda value: None if value in allowed else f"it must be one of {listed}"


def anything(value: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: dotted, Kafka-like, unit last (`linger.ms`).
        type: int, float, bool or str.
        default: of that type, or None where unset means something (say what in `why`).
        check: what is allowed; see `at_least`, `between`, `one_of`.
        why: one sentence: what it does, and what a larger or smaller value costs.
    """

    name: str
    type: type
    default: Any
    check: Check
    why: str

    @property
    def attribute(self) -> str:
        return self.name.replace(".", "_")

    def parse(self, value: Any) -> Any:
        """The typed value of a text or typed value; raises InvalidSetting."""
        if value is None:
            return self._checked(self.default)
        if isinstance(value, str):
            value = self._from_text(value.strip())
            if value is None:  # `flush.ms=` in a file: unset
                return self._checked(None)
        elif self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, self.type) or (self.type is not bool and isinstance(value, bool)):
            raise InvalidSetting(name=self.name, value=value, reason=f"it must be {_KINDS[self.type]}")
        return self._checked(value)

    def _from_text(self, text: str) -> Any:
        if self.type is bool:
            if text.lower() in ("true", "yes", "on", "1"):
                return True
            if text.lower() in ("false", "no", "off", "0"):
                return False
            return text
        if text == "" and self.default is None:
            return None
        if self.type in (int, float):
            try:
                return self.type(text.replace("_", ""))
            except ValueError:
                return text
        return text

    def _checked(self, value: Any) -> Any:
        if value is None and self.default is None:
            return None
        wrong = self.check(value)
        if wrong:
            raise InvalidSetting(name=self.name, value=value, reason=wrong)
        return value

    def to_text(self, value: Any) -> str:
        """The value as a conf file holds it."""
        if value is None:
            return ""
        return str(value).lower() if self.type is bool else str(value)


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class Values:
    """Typed values of a table's settings, as attributes (`values.segment_bytes`). Immutable."""

    def __init__(self, table: Table, values: dict[str, Any], given: frozenset[str]) -> None:
        self.__dict__["_table"] = table
        self.__dict__["_given"] = given
        self.__dict__.update({table[name].attribute: value for name, value in values.items()})

    def __getattr__(self, name: str) -> Any:  # only reached for what __dict__ lacks
        raise AttributeError(f"no {self.__dict__['_table'].what} setting '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("settings do not change; parse a new set")

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("pickle the given options and parse them again")

    def given(self) -> dict[str, Any]:
        """Only what was set, by dotted name."""
        return {name: value for name, value in self.items() if name in self.__dict__["_given"]}

    def items(self) -> Iterator[tuple[str, Any]]:
        """(dotted name, value) of every setting, in the table's order."""
        for setting in self.__dict__["_table"]:
            yield setting.name, self.__dict__[setting.attribute]

    def with_(self, changes: Mapping[str, Any]) -> Values:
        """A new set with some settings changed; None takes one back to its default."""
        kept = self.given()
        for name, value in changes.items():
            kept.pop(name, None)
            if value is not None:
                kept[name] = value
        return self.__dict__["_table"].parse(kept)


class Table:
    """The settings of one thing (a broker, a topic, a producer).

    Args:
        what: the thing, as errors name it.
        settings: its rows, in the order in which docs list them.
        check_together: looks at all values at once; returns (setting's name, what is wrong) or None.
        elsewhere: dotted names that are looked for here and are not here -> what the sentence says of them.
    """

    def __init__(
        self,
        what: str,
        settings: Iterable[Setting],
        check_together: Callable[[Values], tuple[str, str] | None] | None = None,
        elsewhere: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.what = what
        self._elsewhere = elsewhere
        self._rows = {setting.name: setting for setting in settings}
        self._check_together = check_together

    def __iter__(self) -> Iterator[Setting]:
        return iter(self._rows.values())

    def __getitem__(self, name: str) -> Setting:
        return self._rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def parse(self, given: Mapping[str, Any] | None = None) -> Values:
        """Typed values from dotted (or snake_case) names; what is not given has its default.

        Raises:
            UnknownSetting: a name that is not in the table; the sentence names the nearest one.
            InvalidSetting: a value of the wrong type or out of range.
        """
        values: dict[str, Any] = {}
        for name, value in (given or {}).items():
            setting = self._rows.get(name) or self._rows.get(name.replace("_", "."))
            if setting is None:
                elsewhere = self._elsewhere.get(name.replace("_", "."))
                hint = f": {elsewhere}" if elsewhere else nearest_hint(name, self._rows)
                raise UnknownSetting(what=self.what, name=name, hint=hint)
            values[setting.name] = setting.parse(value)
        given_names = frozenset(name for name, value in values.items() if value is not None)
        complete = {name: values.get(name, setting.default) for name, setting in self._rows.items()}
        result = Values(self, complete, given_names)
        wrong = self._check_together(result) if self._check_together else None
        if wrong:
            name, reason = wrong
            raise InvalidSetting(name=name, value=complete[name], reason=reason)
        return result

    def understood(self, given: Mapping[str, Any]) -> tuple[Values, dict[str, str]]:
        """What another version may have written, as far as this one understands it; all else has its default.

        Returns:
            the values; and why each of the others was refused, by its name as it was given.
        """
        kept: dict[str, Any] = {}
        refused: dict[str, str] = {}
        for name, value in given.items():
            if name not in self._rows:
                refused[name] = "this version does not know it"
                continue
            try:
                self._rows[name].parse(value)
                kept[name] = value
            except InvalidSetting as error:
                refused[name] = str(error.facts["reason"])
        while True:
            try:
                return self.parse(kept), refused
            except InvalidSetting as error:  # they do not go together
                name = error.facts["name"]
                if name not in kept:
                    raise
                refused[name] = str(error.facts["reason"])
                del kept[name]

    def properties_text(self) -> str:
        """A conf file (`name=value`) with every setting at its default, commented out, and why it is there."""
        rows = [f"# {s.why}\n#{s.name}={s.to_text(s.default)}\n" for s in self]
        return "\n".join(rows)

    def markdown(self) -> str:
        """The docs table of these settings."""
        rows = [f"| `{s.name}` | {_default_text(s)} | {s.why} |" for s in self]
        return "\n".join(["| setting | default | what it does |", "| --- | --- | --- |", *rows]) + "\n"


def _default_text(setting: Setting) -> str:
    return "unset" if setting.default is None else f"`{setting.to_text(setting.default)}`"


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest known name, or '' if none is near."""
    close = difflib.get_close_matches(name.replace("_", "."), list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def read_properties(text: str, where: str) -> dict[str, str]:
    """The pairs of a `name=value` file; `#` starts a comment line. Raises InvalidSetting with the line, also of a name
    that is given twice."""
    pairs: dict[str, str] = {}
    lines: dict[str, int] = {}  # by dotted name
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise InvalidSetting(name=f"{where} line {number}", value=line, reason="expected name=value")
        first = lines.setdefault(name.strip().replace("_", "."), number)
        if first != number:
            reason = f"line {first} gives {name.strip()} already: take one of them out"
            raise InvalidSetting(name=f"{where} line {number}", value=line, reason=reason)
        pairs[name.strip()] = value.strip()
    return pairs
