"""The table of options, and names that it does not have: one clear sentence for each."""

from __future__ import annotations

import logging

import pytest

from kafkalog.errors import InvalidArgument
from pyspark_kafkalog import options

READ = {"kafkalog.bootstrap.servers": "one:9192", "subscribe": "flights"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("subscribes", "has no option 'subscribes'; did you mean 'subscribe'?"),
        ("startingoffset", "has no option 'startingoffset'; did you mean 'startingOffsets'?"),
        ("bootstrap.servers", "did you mean 'kafkalog.bootstrap.servers'?"),
        ("group.id", "has no option 'group.id'; did you mean 'kafkalog.group.id'?"),
        ("request.timeout.ms", "has no option 'request.timeout.ms'; did you mean 'kafkalog.request.timeout.ms'?"),
        ("xyzzy", "has no option 'xyzzy'"),
        ("kafkalog.bootstrap.server", "'kafkalog.bootstrap.server'"),
        ("kafkalog.linger.mss", "did you mean 'kafkalog.linger.ms'?"),
        ("kafkalog.bootstrap_servers", "did you mean 'kafkalog.bootstrap.servers'?"),
        ("kafkalog.group_id", "did you mean 'kafkalog.group.id'?"),
        ("kafka.auto.offset.reset", "set startingOffsets instead"),
        ("kafka.key.serializer", "keys are written as the bytes of the column"),
        ("kafka.value.serializer", "values are written as the bytes of the column"),
        ("kafka.partitioner.class", "a row goes where its column 'partition' says"),
    ],
)
def test_an_unknown_option_names_the_nearest_known_one(name: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        options.check_names({name: "x"})
    assert says in str(raised.value)


def test_sparks_own_options_and_client_settings_pass() -> None:
    options.check_names(
        {"path": "x", "checkpointLocation": "/c", "queryName": "q", "kafka.linger.ms": "5", "kafkalog.linger.ms": "6"}
    )


def test_a_table_which_spark_would_read_without_its_options_is_refused_when_it_is_made() -> None:
    with pytest.raises(InvalidArgument, match=r"^a table made with CREATE TABLE cannot be read .* TEMPORARY VIEW"):
        options.check_names({**READ, "owner": "me", "option.subscribe": "t", "provider": "kafkalog"})
    with pytest.raises(InvalidArgument, match=r"^no option is given; .* a table made with CREATE TABLE"):
        options.check_names({})


@pytest.mark.parametrize("prefix", ["kafka.", "kafkalog.", ""])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("security.protocol", "SASL_SSL"),
        ("security.providers", "some.Class"),
        ("sasl.jaas.config", "secret"),
        ("ssl.truststore.location", "/keys"),
    ],
)
def test_what_asks_for_encryption_or_authentication_is_refused(prefix: str, setting: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=f"the option {prefix}{setting} is not supported: connections") as raised:
        options.check_names({**READ, "kafka.security.protocol": "PLAINTEXT", (prefix + setting).upper(): value})
    assert "secret" not in str(raised.value)


def test_what_asks_for_no_encryption_passes_unwarned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        options.check_names({"kafka.security.protocol": " plaintext", "kafkalog.security.protocol": "PLAINTEXT"})
    assert caplog.text == ""


def test_a_kafka_setting_that_means_nothing_here_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        options.check_names({"kafka.fetch.min.bytes.in.hell": "5"})
    assert "kafka.fetch.min.bytes.in.hell" in caplog.text


def test_the_docs_table_has_every_option_once() -> None:
    rows = options.markdown().splitlines()
    assert len(rows) == len(options.OPTIONS) + 2
    for option in options.OPTIONS:
        assert sum(f"| `{option.name}` |" in row for row in rows) == 1
    assert len({row.count("|") for row in rows}) == 1


def test_every_default_is_a_value_of_its_option() -> None:
    for option in options.OPTIONS:
        for use in option.used_by:
            assert (option.default_value(use) is None) == isinstance(option.default, options.Unset), option.name
