"""Patterns of topics' names."""

from __future__ import annotations

import re

import pytest

from kafkalog.client.consumer.consumer import _topics_or_pattern
from kafkalog.errors import InvalidArgument
from kafkalog.patterns import matcher


def test_a_whole_name_is_matched_in_linear_time() -> None:
    assert matcher("logs-.*")("logs-1")
    assert not matcher("logs-.*")("old-logs-1")
    assert not matcher("logs")("logs-1")
    assert not matcher("(a|aa)+$")("a" * 249 + "b"), "it takes for ever by backtracking"


@pytest.mark.parametrize("pattern", ["(", "(?=a)b", r"(a)\1", "a{1000}{1000}"])
def test_what_is_no_pattern_is_one_sentence(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match=r"is not a regular expression as RE2 knows them .*: \S") as raised:
        _topics_or_pattern(re.compile(pattern) if pattern.startswith("(?=") else "^" + pattern)
    assert "\n" not in str(raised.value)


def test_flags_of_a_compiled_expression_are_kept_or_refused() -> None:
    assert _topics_or_pattern(re.compile("logs")) == ((), "logs")
    _, pattern = _topics_or_pattern(re.compile("logs.", re.IGNORECASE | re.DOTALL))
    assert matcher(pattern)("LOGS1")
    with pytest.raises(InvalidArgument, match="only IGNORECASE, DOTALL and MULTILINE can be used"):
        _topics_or_pattern(re.compile("l o g s", re.VERBOSE))


def test_a_pattern_of_several_parts_is_of_the_beginning_of_a_name_in_each() -> None:
    _, pattern = _topics_or_pattern("^logs|^old")
    assert all(matcher(pattern)(name) for name in ("logs", "logs-1", "old-logs"))
    assert not matcher(pattern)("my-logs")
