"""Events as name and values, over the user's logging."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from kafkalog.events import get_logger


def test_an_event_is_its_name_and_its_values(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger("kafkalog.test")
    with caplog.at_level(logging.DEBUG, logger="kafkalog.test"):
        log.info("segment_rolled", partition="t-0", base_offset=500, clean=True, reason="two words")
        log.debug("stopped")
    first, second = caplog.records
    assert first.getMessage() == 'segment_rolled partition=t-0 base_offset=500 clean=true reason="two words"'
    assert first.funcName == "test_an_event_is_its_name_and_its_values"
    assert (second.getMessage(), second.levelname) == ("stopped", "DEBUG")


def test_a_value_with_a_percent_sign_is_no_format(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("kafkalog.test").warning("odd", name="%s%d")
    assert caplog.records[0].getMessage() == "odd name=%s%d"


def test_a_disabled_event_renders_nothing() -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError("rendered")

    get_logger("kafkalog.test.disabled").debug("quiet", value=Unprintable())


def test_an_exception_event_has_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("the cause")
    except ValueError:
        get_logger("kafkalog.test").exception("failed", what="it")
    assert "failed what=it" in caplog.text
    assert "ValueError: the cause" in caplog.text


def test_importing_it_configures_nothing_and_stderr_gets_our_events_only_when_asked() -> None:
    program = """
import sys, logging
from kafkalog.events import get_logger, log_to_stderr
assert "structlog" not in sys.modules and not logging.root.handlers
log_to_stderr("info")
get_logger("broker.x").info("shown", a=1)
get_logger("broker.x").debug("hidden")
get_logger("somebody.else").info("hidden")
get_logger("somebody.else").warning("warned")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [line.split(maxsplit=2)[2].split() for line in done.stderr.splitlines()] == [
        ["INFO", "broker.x", "shown", "a=1"],
        ["WARNING", "somebody.else", "warned"],
    ]


def test_an_event_is_reported_also_when_rendering_cannot_be_imported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptors() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("kafkalog.events._renderer", no_descriptors)
    get_logger("kafkalog.test").warning("accept_failed", reason="x")
    assert caplog.records[0].getMessage() == "accept_failed {'reason': 'x'}"
