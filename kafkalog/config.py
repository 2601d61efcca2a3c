"""Settings, declared once: a `Setting` is one row; parsing, validation, help, conf files and docs are made from it.

    class PumpSettings(Settings, what="pump"):
        pause_ms = Setting(int, 10, at_least(1), "How long it rests.")

    PumpSettings.parse({"pause.ms": "20"}).pause_ms  # 20, an int to mypy too

In files and on the wire names are dotted (`pause.ms`); in code they are the same words in snake_case. Knows no
particular setting: those of brokers and topics are in `broker/config.py`, the client's in `kafkalog/client/config.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NoReturn, Self, TypeVar, overload

from kafkalog.errors import InvalidSetting, UnknownSetting

_Value = TypeVar("_Value")
_Given = TypeVar("_Given", int, float, bool, str)
_Checked = TypeVar("_Checked", contravariant=True)

Check = Callable[[_Checked], str | None]
"""Returns what is wrong with a value, or None."""


def at_least(minimum: int) -> Check[float]:
    return lambda value: None if value >= minimum else f"it must be at least {minimum}"


def between(minimum: int, maximum: int) -> Check[float]:
    return lambda value: None if minimum <= value <= maximum else f"it must be from {minimum} to {maximum}"


def one_of(*allowed: str) -> Check[str]:
    return lambda value: None if value in allowed else f"it must be one of {', '.join(allowed)}"


def anything(value: object) -> str | None:
    return None


class Setting(Generic[_Value]):
    """One setting: a row in the class of `Settings` that it is an attribute of, a value in each of its instances.

    Attributes:
        name: dotted, Kafka-like, unit last (`linger.ms`); the attribute's with dots.
        type: int, float, bool or str.
        default: of that type, or None if being unset has a meaning (state it in `why`).
        check: the allowed values; see `at_least`, `between`, `one_of`.
        why: one sentence: what it does, and what a larger or smaller value costs.
    """

    name: str
    default: _Value

    @overload
    def __init__(
        self: Setting[_Given], kind: type[_Given], default: _Given, check: Check[_Given], why: str
    ) -> None: ...

    @overload
    def __init__(
        self: Setting[_Given | None], kind: type[_Given], default: None, check: Check[_Given], why: str
    ) -> None: ...

    def __init__(self, kind: type[Any], default: Any, check: Check[Any], why: str) -> None:
        self.type: type[_Value] = kind
        self.default = default
        self.check = check
        self.why = why

    def __set_name__(self, owner: type[Settings], attribute: str) -> None:
        self.attribute = attribute
        self.name = attribute.replace("_", ".")

    @overload
    def __get__(self, settings: None, owner: type[Settings]) -> Setting[_Value]: ...

    @overload
    def __get__(self, settings: Settings, owner: type[Settings]) -> _Value: ...

    def __get__(self, settings: Settings | None, owner: type[Settings]) -> Setting[_Value] | _Value:
        assert settings is None, "an instance's own values come first"
        return self

    def parse(self, value: object) -> _Value:
        """The typed value of a text or typed value; raises InvalidSetting."""
        if isinstance(value, str):
            value = self._from_text(value.strip())
        elif self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is None:  # `flush.ms=` in a file, too
            return self.default
        if not isinstance(value, self.type) or (self.type is not bool and isinstance(value, bool)):
            raise InvalidSetting(name=self.name, value=value, reason=f"it must be {_KINDS[self.type]}")
        wrong = self.check(value)
        if wrong:
            raise InvalidSetting(name=self.name, value=value, reason=wrong)
        return value

    def _from_text(self, text: str) -> object:
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
                return int(text.replace("_", "")) if self.type is int else float(text.replace("_", ""))
            except ValueError:
                return text
        return text

    def to_text(self, value: _Value) -> str:
        """The value as a conf file holds it."""
        if value is None:
            return ""
        return str(value).lower() if self.type is bool else str(value)


_KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


class Settings:
    """Typed values of the settings of one thing (a broker, a topic, a producer), as attributes. Immutable.

    Attributes:
        what: the thing, as errors name it.
        elsewhere: dotted names that users look for here, but which are not settings here -> hint for the error's
            sentence.
        rows: the settings by dotted name, in the order in which docs list them: the class's own, then its base's.
    """

    what: ClassVar[str]
    elsewhere: ClassVar[Mapping[str, str]]
    rows: ClassVar[Mapping[str, Setting[Any]]] = MappingProxyType({})
    _given: frozenset[str]

    def __init_subclass__(cls, what: str, elsewhere: Mapping[str, str] = MappingProxyType({})) -> None:
        cls.what = what
        cls.elsewhere = elsewhere
        own = {row.name: row for row in vars(cls).values() if isinstance(row, Setting)}
        cls.rows = MappingProxyType(own | {name: row for name, row in cls.rows.items() if name not in own})

    def __init__(self, values: Mapping[str, Any], given: frozenset[str]) -> None:
        self.__dict__.update({row.attribute: values[name] for name, row in self.rows.items()}, _given=given)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("settings do not change; parse a new set")

    def __reduce__(self) -> NoReturn:
        raise TypeError("pickle the given options and parse them again")

    def conflict(self) -> tuple[str, str] | None:
        """The name of a setting that conflicts with others, and the reason; or None."""
        return None

    def given(self) -> dict[str, Any]:
        """Only the settings that were set, by dotted name."""
        return {name: value for name, value in self.items() if name in self._given}

    def items(self) -> Iterator[tuple[str, Any]]:
        """(dotted name, value) of every setting, in the order of the rows."""
        for name, row in self.rows.items():
            yield name, self.__dict__[row.attribute]

    def with_(self, changes: Mapping[str, object]) -> Self:
        """A copy with some settings changed; None resets one to its default."""
        kept = self.given()
        for name, value in changes.items():
            kept.pop(name, None)
            if value is not None:
                kept[name] = value
        return self.parse(kept)

    @classmethod
    def parse(cls, given: Mapping[str, object] | None = None) -> Self:
        """Typed values from dotted (or snake_case) names; settings that are not given have their defaults.

        Raises:
            UnknownSetting: a name that is not among the rows; the sentence names the nearest one.
            InvalidSetting: a value of the wrong type or out of range.
        """
        values: dict[str, Any] = {}
        for name, value in (given or {}).items():
            row = cls.rows.get(name) or cls.rows.get(name.replace("_", "."))
            if row is None:
                elsewhere = cls.elsewhere.get(name.replace("_", "."))
                hint = f": {elsewhere}" if elsewhere else nearest_hint(name, cls.rows)
                raise UnknownSetting(what=cls.what, name=name, hint=hint)
            values[row.name] = row.parse(value)
        given_names = frozenset(name for name, value in values.items() if value is not None)
        complete = {name: values.get(name, row.default) for name, row in cls.rows.items()}
        result = cls(complete, given_names)
        wrong = result.conflict()
        if wrong:
            name, reason = wrong
            raise InvalidSetting(name=name, value=complete[name], reason=reason)
        return result

    @classmethod
    def understood(cls, given: Mapping[str, object]) -> tuple[Self, dict[str, str]]:
        """Typed values of settings that another version may have written. Those that this version does not understand
        have their defaults.

        Returns:
            the values; and why each of the others was refused, by its name as given.
        """
        kept: dict[str, object] = {}
        refused: dict[str, str] = {}
        for name, value in given.items():
            if name not in cls.rows:
                refused[name] = "this version does not know it"
                continue
            try:
                cls.rows[name].parse(value)
                kept[name] = value
            except InvalidSetting as error:
                refused[name] = str(error.facts["reason"])
        while True:
            try:
                return cls.parse(kept), refused
            except InvalidSetting as error:  # they conflict
                name = str(error.facts["name"])
                if name not in kept:
                    raise
                refused[name] = str(error.facts["reason"])
                del kept[name]

    @classmethod
    def properties_text(cls) -> str:
        """A conf file (`name=value`) with every setting at its default, commented out, and its `why`."""
        rows = [f"# {row.why}\n#{row.name}={row.to_text(row.default)}\n" for row in cls.rows.values()]
        return "\n".join(rows)

    @classmethod
    def markdown(cls) -> str:
        """The docs table of these settings."""
        rows = [f"| `{row.name}` | {_default_text(row)} | {row.why} |" for row in cls.rows.values()]
        return "\n".join(["| setting | default | what it does |", "| --- | --- | --- |", *rows]) + "\n"


def _default_text(row: Setting[Any]) -> str:
    return "unset" if row.default is None else f"`{row.to_text(row.default)}`"


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
