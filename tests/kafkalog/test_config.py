"""Settings by themselves: how values are read, checked, changed and written, and what a mistake is told."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from kafkalog.config import Setting, Settings, anything, at_least, between, nearest_hint, one_of, read_properties
from kafkalog.errors import InvalidSetting, UnknownSetting


class Pump(Settings, what="pump", elsewhere={"color": "paint it"}):
    low_mark = Setting(int, 1, at_least(0), "Lower.")
    high_mark = Setting(int, 10, between(1, 100), "Upper.")
    rate = Setting(float, 0.5, at_least(0), "Speed.")
    is_on = Setting(bool, True, anything, "On.")
    mode = Setting(str, "slow", one_of("slow", "fast"), "Mode.")
    pause_ms = Setting(int, None, at_least(1), "Unset: none.")
    label = Setting(str, None, anything, "Unset: none.")

    def conflict(self) -> tuple[str, str] | None:
        return ("low.mark", "it is above high.mark") if self.low_mark > self.high_mark else None


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("low.mark", " 1_0 ", 10),
        ("low.mark", 0, 0),
        ("high.mark", 1, 1),
        ("high.mark", "100", 100),
        ("rate", 2, 2.0),
        ("rate", "0.25", 0.25),
        ("rate", "1_0.5", 10.5),
        *(("is.on", text, True) for text in ("true", "YES", "On", "1", True)),
        *(("is.on", text, False) for text in ("false", "NO", "Off", "0", False)),
        ("mode", "fast", "fast"),
        ("pause.ms", "", None),
        ("pause.ms", " ", None),
        ("pause.ms", None, None),
        ("label", "", None),
        ("low.mark", None, 1),
    ],
)
def test_a_value_is_read_as_its_type(name: str, given: Any, value: Any) -> None:
    read = dict(Pump.parse({name: given}).items())[name]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("low.mark", -1, "it must be at least 0"),
        ("high.mark", 0, "it must be from 1 to 100"),
        ("high.mark", "101", "it must be from 1 to 100"),
        ("low.mark", "1.5", "it must be a whole number"),
        ("low.mark", 1.5, "it must be a whole number"),
        ("low.mark", True, "it must be a whole number"),
        ("low.mark", "", "it must be a whole number"),
        ("rate", True, "it must be a number"),
        ("rate", "quick", "it must be a number"),
        ("is.on", 1, "it must be true or false"),
        ("is.on", "perhaps", "it must be true or false"),
        ("mode", 1, "it must be text"),
        ("mode", "quick", "it must be one of slow, fast"),
        ("mode", "", "it must be one of slow, fast"),
        ("pause.ms", "0", "it must be at least 1"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_the_reason(name: str, given: Any, reason: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        Pump.parse({name: given})
    assert (caught.value.facts["name"], str(caught.value.facts["value"])) == (name, str(given))
    assert caught.value.facts["reason"] == reason


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InvalidSetting) as caught:
        Pump.parse({"low.mark": "20"})
    assert caught.value.facts == {"name": "low.mark", "value": 20, "reason": "it is above high.mark"}
    assert Pump.parse({"low.mark": 20, "high.mark": 20}).low_mark == 20


def test_an_unknown_name_is_told_the_nearest_or_where_it_belongs() -> None:
    for name in ("hihg.mark", "hihg_mark"):
        with pytest.raises(UnknownSetting, match=f"there is no pump setting '{name}'; did you mean 'high.mark'"):
            Pump.parse({name: 1})
    with pytest.raises(UnknownSetting, match="there is no pump setting 'color': paint it"):
        Pump.parse({"color": "red"})
    with pytest.raises(UnknownSetting, match=r"there is no pump setting 'xyzzy'$"):
        Pump.parse({"xyzzy": "red"})
    assert nearest_hint("xyzzy", ["high.mark"]) == ""


def test_names_may_be_dotted_or_in_snake_case_and_what_was_given_is_known() -> None:
    values = Pump.parse({"low_mark": "2", "high.mark": 10, "pause_ms": None})
    assert (values.low_mark, values.high_mark, values.rate) == (2, 10, 0.5)
    assert values.given() == {"low.mark": 2, "high.mark": 10}  # one at its default too, but none that is None
    assert [name for name, _ in values.items()] == list(Pump.rows)
    assert Pump.parse().given() == {}


def test_a_changed_set_leaves_the_first_as_it_was() -> None:
    first = Pump.parse({"low.mark": 2, "mode": "fast"})
    changed = first.with_({"low.mark": None, "rate": 3})
    assert changed.given() == {"mode": "fast", "rate": 3.0}
    assert changed.low_mark == 1
    assert first.given() == {"low.mark": 2, "mode": "fast"}
    with pytest.raises(InvalidSetting):
        first.with_({"low.mark": 50})


def test_values_do_not_change_and_are_not_pickled() -> None:
    values = Pump.parse()
    with pytest.raises(AttributeError, match="parse a new set"):
        values.low_mark = 5
    with pytest.raises(AttributeError, match="'Pump' object has no attribute 'depth'"):
        _ = values.depth  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="pickle the given options"):
        pickle.dumps(values)


def test_what_another_version_wrote_is_understood_as_far_as_it_goes() -> None:
    values, refused = Pump.understood({"low.mark": "3", "depth": "4", "mode": "sideways", "label": "x"})
    assert values.given() == {"low.mark": 3, "label": "x"}
    assert refused == {"depth": "this version does not know it", "mode": "it must be one of slow, fast"}
    values, refused = Pump.understood({"low.mark": "30", "label": "x"})  # good alone, and not beside the default
    assert values.given() == {"label": "x"}
    assert refused == {"low.mark": "it is above high.mark"}


def test_settings_that_were_not_given_and_do_not_go_together_are_a_defect_that_is_reported() -> None:
    class Crossed(Pump, what="pump"):
        low_mark = Setting(int, 11, at_least(0), ".")

    with pytest.raises(InvalidSetting):
        Crossed.understood({})


def test_the_conf_file_of_all_defaults_is_read_as_these() -> None:
    text = Pump.properties_text()
    assert "# Lower.\n#low.mark=1\n" in text
    assert "#is.on=true\n" in text
    assert "#pause.ms=\n" in text
    assert read_properties(text, "f") == {}
    uncommented = "\n".join(line.removeprefix("#") for line in text.splitlines() if not line.startswith("# "))
    assert dict(Pump.parse(read_properties(uncommented, "f")).items()) == dict(Pump.parse().items())
    assert "| `pause.ms` | unset | Unset: none. |" in Pump.markdown()
    assert "| `is.on` | `true` | On. |" in Pump.markdown()


def test_a_line_of_a_conf_file_is_a_name_and_a_value() -> None:
    text = "# a comment\n\n  low.mark = 1 \nlabel=a=b # c\nmode=\n"
    assert read_properties(text, "f") == {"low.mark": "1", "label": "a=b # c", "mode": ""}
    for line in ("low.mark", " = 1"):
        with pytest.raises(InvalidSetting, match="f line 2="):
            read_properties(f"\n{line}\n", "f")
