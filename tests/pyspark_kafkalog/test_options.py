"""Options: text to typed values, and one clear sentence for each mistake."""

from __future__ import annotations

import logging

import pytest

from kafkalog.errors import InvalidArgument, InvalidSetting
from kafkalog.records import TopicPartition
from pyspark_kafkalog import options
from pyspark_kafkalog.offsets import EARLIEST, LATEST

SERVERS = {"kafkalog.bootstrap.servers": "one:9192, two:9194"}
READ = {**SERVERS, "subscribe": "flights"}


def test_a_read_with_nothing_but_the_needful_has_the_connectors_defaults() -> None:
    parsed = options.parse_source(READ)
    assert parsed.bootstrap_servers == "one:9192,two:9194"
    assert parsed.selection.topics() == ("flights",)
    assert [bound.position for bound in parsed.batch_bounds()] == [EARLIEST, LATEST]
    assert parsed.stream_start().position == LATEST
    assert (parsed.include_headers, parsed.max_offsets_per_trigger) == (False, None)


def test_names_are_compared_without_case() -> None:
    parsed = options.parse_source({**SERVERS, "subscribepattern": "fl.*", "MAXOFFSETSPERTRIGGER": "7"})
    assert parsed.selection.matches("flights")
    assert parsed.max_offsets_per_trigger == 7


def test_everything_given_is_parsed() -> None:
    parsed = options.parse_source(
        {
            "kafka.bootstrap.servers": "[::1]:9192",
            "assign": '{"b": [1], "a": [0]}',
            "startingOffsets": '{"a": {"0": 5}, "b": {"1": -2}}',
            "endingOffsets": "latest",
            "includeHeaders": "TRUE",
        }
    )
    a0, b1 = TopicPartition("a", 0), TopicPartition("b", 1)
    assert parsed.bootstrap_servers == "[::1]:9192"
    assert parsed.selection.topics() == ("a", "b")
    assert [p for p in (a0, b1, TopicPartition("a", 1)) if parsed.selection.takes(p)] == [a0, b1]
    assert [bound.position for bound in parsed.batch_bounds()] == [{a0: 5, b1: EARLIEST}, LATEST]
    assert parsed.include_headers


@pytest.mark.parametrize("acks", ["-1", "all", "1", "0"])
def test_acks_are_what_a_producer_takes(acks: str) -> None:
    assert options.parse_sink({**SERVERS, "kafka.acks": acks}).client == {"acks": acks}
    with pytest.raises(InvalidSetting, match="acks='2' is not valid"):
        options.parse_sink({**SERVERS, "kafka.acks": "2"})


def test_a_pattern_is_found_anywhere_in_a_name() -> None:
    selection = options.parse_source({**SERVERS, "subscribePattern": "light|^b$"}).selection
    assert [topic for topic in ("flights", "b", "ab") if selection.matches(topic)] == ["flights", "b"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"subscribe": "t"}, "kafkalog.bootstrap.servers is missing"),
        ({**READ, "kafkalog.bootstrap.servers": "nowhere"}, "it must be host:port"),
        ({**READ, "kafkalog.bootstrap.servers": " , "}, "it must be host:port"),
        ({**READ, "kafka.bootstrap.servers": "other:1"}, "two names of one option"),
        (SERVERS, "a read needs one of the options subscribe, subscribePattern, assign"),
        ({**READ, "assign": '{"t": [0]}'}, "a read needs only one of the options subscribe, assign"),
        ({**SERVERS, "subscribe": " ,"}, "subscribe=' ,' names no topic"),
        ({**SERVERS, "subscribePattern": "("}, "is no regular expression"),
        ({**SERVERS, "subscribePattern": " "}, "subscribePattern is empty"),
        ({**SERVERS, "assign": "t"}, "assign='t' is not valid"),
        ({**READ, "startingOffsets": "now"}, "startingOffsets='now' is not valid"),
        ({**READ, "endingOffsets": "now"}, "endingOffsets='now' is not valid"),
        ({**READ, "includeHeaders": "yes"}, "it must be true or false"),
        ({**READ, "maxOffsetsPerTrigger": "0"}, "it must be a whole number of at least 1"),
        ({**READ, "maxOffsetsPerTrigger": "many"}, "it must be a whole number of at least 1"),
    ],
)
def test_a_wrong_option_of_a_read_gets_one_clear_sentence(given: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        options.parse_source(given)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("subscribes", "has no option 'subscribes'; did you mean 'subscribe'?"),
        ("startingoffset", "has no option 'startingoffset'; did you mean 'startingOffsets'?"),
        ("bootstrap.servers", "did you mean 'kafkalog.bootstrap.servers'?"),
        ("xyzzy", "has no option 'xyzzy'"),
        ("kafkalog.bootstrap.server", "'kafkalog.bootstrap.server'"),
        ("kafkalog.linger.mss", "did you mean 'kafkalog.linger.ms'?"),
        ("kafka.auto.offset.reset", "set startingOffsets instead"),
        ("kafka.key.serializer", "not supported"),
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


def test_a_kafka_setting_that_means_nothing_here_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        options.check_names({"kafka.fetch.min.bytes.in.hell": "5"})
    assert "kafka.fetch.min.bytes.in.hell" in caplog.text


def test_client_settings_are_passed_on_and_ours_beat_kafkas() -> None:
    parsed = options.parse_sink(
        {**SERVERS, "kafka.linger.ms": "5", "kafkalog.linger.ms": "6", "kafka.compression.type": "lz4", "kafka.x": "1"}
    )
    assert parsed.client == {"linger.ms": "6", "compression.type": "lz4"}


def test_a_write_needs_only_servers() -> None:
    assert options.parse_sink(SERVERS).topic is None
    assert options.parse_sink({**SERVERS, "topic": " out "}).topic == "out"
    with pytest.raises(InvalidArgument, match="topic is empty"):
        options.parse_sink({**SERVERS, "topic": " "})


def test_the_docs_table_has_every_option_once() -> None:
    rows = options.markdown().splitlines()
    assert len(rows) == len(options.OPTIONS) + 2
    for option in options.OPTIONS:
        assert sum(f"| `{option.name}` |" in row for row in rows) == 1
    assert len({row.count("|") for row in rows}) == 1
