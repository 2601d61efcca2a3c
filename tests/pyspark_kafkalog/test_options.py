"""Options: text to typed values, and one clear sentence for each mistake."""

from __future__ import annotations

import logging

import pytest

from kafkalog.errors import InvalidArgument, InvalidSetting
from kafkalog.records import TopicPartition
from pyspark_kafkalog import options
from pyspark_kafkalog.offsets import EARLIEST, LATEST
from pyspark_kafkalog.write import options as sink_options

SERVERS = {"kafkalog.bootstrap.servers": "one:9192, two:9194"}
READ = {**SERVERS, "subscribe": "flights"}


def test_a_read_with_nothing_but_the_needful_has_the_connectors_defaults() -> None:
    parsed = options.parse_source(READ)
    assert parsed.bootstrap_servers == "one:9192,two:9194"
    assert parsed.selection.topics() == ("flights",)
    assert [bound.position for bound in parsed.batch_bounds()] == [EARLIEST, LATEST]
    assert parsed.stream_start().position == LATEST
    assert (parsed.include_headers, parsed.fail_on_data_loss) == (False, True)
    assert (parsed.max_offsets_per_trigger, parsed.min_offsets_per_trigger, parsed.max_trigger_delay_s) == (
        None,
        None,
        15 * 60,
    )
    assert (parsed.min_partitions, parsed.max_records_per_partition) == (None, None)
    assert (parsed.fetch_attempts, parsed.fetch_retry_interval_ms) == (3, 1000)


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
    assert sink_options.parse_sink({**SERVERS, "kafka.acks": acks}).client == {"acks": acks}
    with pytest.raises(InvalidSetting, match="acks='2' is not valid"):
        sink_options.parse_sink({**SERVERS, "kafka.acks": "2"})


def test_a_pattern_matches_a_whole_name() -> None:
    """As Java's Pattern.matches in Spark's Kafka connector, and as `kafkalog consume --pattern`."""
    selection = options.parse_source({**SERVERS, "subscribePattern": "fl.*|^b$"}).selection
    assert [topic for topic in ("flights", "b", "ab", "in-flight") if selection.matches(topic)] == ["flights", "b"]


def test_the_topics_of_assigned_partitions_come_once_each_and_sorted() -> None:
    assert options.parse_source({**SERVERS, "assign": '{"t": [1, 0], "a": [3]}'}).selection.topics() == ("a", "t")


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
        ({**SERVERS, "subscribePattern": "("}, "is not a regular expression"),
        ({**SERVERS, "subscribePattern": " "}, "subscribePattern is empty"),
        ({**SERVERS, "assign": "t"}, "assign='t' is not valid"),
        ({**READ, "startingOffsets": "now"}, "startingOffsets='now' is not valid"),
        ({**READ, "endingOffsets": "now"}, "endingOffsets='now' is not valid"),
        ({**READ, "includeHeaders": "yes"}, "it must be true or false"),
        ({**READ, "maxOffsetsPerTrigger": "0"}, "it must be a whole number of at least 1"),
        ({**READ, "maxOffsetsPerTrigger": "many"}, "it must be a whole number of at least 1"),
        ({**READ, "kafkaConsumer.pollTimeoutMs": str(1 << 31)}, "it must be a number of milliseconds, at least 1"),
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


def test_a_writes_checkpoint_is_an_option_of_writes_that_reads_ignore() -> None:
    write = {**SERVERS, "topic": "t"}
    for stream in (False, True):
        assert sink_options.parse_sink(write, stream=stream).checkpoint is None
        sink = sink_options.parse_sink({**write, "CheckpointLocation": "s3a://b/a folder"}, stream=stream)
        assert sink.checkpoint == "s3a://b/a folder"
    with pytest.raises(InvalidArgument, match="the option checkpointLocation is empty"):
        sink_options.parse_sink({**write, "checkpointLocation": " "})
    assert "checkpointLocation" not in options.parse_source({**READ, "checkpointLocation": " "}).given


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


@pytest.mark.parametrize(
    ("given", "topics"),
    [
        ({"path": "b, a"}, ("a", "b")),
        ({"paths": '["b", "a"]'}, ("a", "b")),
        ({"path": "a", "subscribe": " a"}, ("a",)),
    ],
)
def test_the_argument_of_load_is_what_is_subscribed_to(given: dict[str, str], topics: tuple[str, ...]) -> None:
    parsed = options.parse_source({**SERVERS, **given})
    assert parsed.selection == options.Selection("subscribe", topics)
    assert parsed.group == options.parse_source({**SERVERS, "subscribe": ",".join(topics)}).group


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"path": "a", "subscribe": "b"}, "'a', the argument of load, and the option subscribe=b differ"),
        ({"path": "a", "assign": '{"a": [0]}'}, "and the option assign="),
        ({"path": "a", "subscribePattern": "a"}, "and the option subscribePattern=a differ"),
        ({"path": "/data/a"}, "'/data/a', the argument of load, is no topic's name"),
    ],
)
def test_an_argument_of_load_that_no_option_agrees_with_is_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        options.parse_source({**SERVERS, **given})
    assert says in str(raised.value)


def test_the_argument_of_save_is_the_topic() -> None:
    assert sink_options.parse_sink({**SERVERS, "path": "flights"}).topic == "flights"
    assert sink_options.parse_sink({**SERVERS, "path": "flights", "topic": "flights"}).topic == "flights"
    with pytest.raises(InvalidArgument, match="'a', the argument of save or start, and the option topic=b differ"):
        sink_options.parse_sink({**SERVERS, "path": "a", "topic": "b"})
    with pytest.raises(InvalidArgument, match="'a/b', the argument of save or start, is no topic's name"):
        sink_options.parse_sink({**SERVERS, "path": "a/b"})


def test_a_kafka_setting_that_means_nothing_here_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        options.check_names({"kafka.fetch.min.bytes.in.hell": "5"})
    assert "kafka.fetch.min.bytes.in.hell" in caplog.text


def test_client_settings_are_passed_on_and_ours_beat_kafkas() -> None:
    parsed = sink_options.parse_sink(
        {**SERVERS, "kafka.linger.ms": "5", "kafkalog.linger.ms": "6", "kafka.compression.type": "lz4", "kafka.x": "1"}
    )
    assert parsed.client == {"linger.ms": "6", "compression.type": "lz4"}


def test_a_write_needs_only_servers() -> None:
    assert sink_options.parse_sink(SERVERS).topic is None
    assert sink_options.parse_sink({**SERVERS, "topic": " out "}).topic == "out"
    with pytest.raises(InvalidArgument, match="topic is empty"):
        sink_options.parse_sink({**SERVERS, "topic": " "})


@pytest.mark.parametrize(
    ("given", "exactly_once", "txn"),
    [
        ({}, True, None),
        ({"delivery": "exactly-once"}, True, None),
        ({"delivery": " At-Least-Once "}, False, None),
        ({"txnAppId": " app ", "txnVersion": "0"}, True, ("app", 0)),
        (
            {"TXNAPPID": "app", "TxnVersion": str((1 << 63) - 1), "delivery": "exactly-once"},
            True,
            ("app", (1 << 63) - 1),
        ),
    ],
)
def test_a_write_is_exactly_once_unless_told_otherwise(
    given: dict[str, str], exactly_once: bool, txn: tuple[str, int] | None
) -> None:
    parsed = sink_options.parse_sink({**SERVERS, "topic": "out", **given})
    assert (parsed.exactly_once, parsed.txn) == (exactly_once, txn)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"delivery": "at-most-once"}, "it must be exactly-once or at-least-once"),
        ({"txnAppId": "app"}, "the option txnAppId requires txnVersion"),
        ({"txnVersion": "1"}, "the option txnVersion requires txnAppId"),
        ({"txnAppId": " ", "txnVersion": "1"}, "the option txnAppId is empty"),
        ({"txnAppId": "app", "txnVersion": "-1"}, "txnVersion='-1' is not valid: it must be a whole number"),
        ({"txnAppId": "app", "txnVersion": "1.0"}, "txnVersion='1.0' is not valid"),
        ({"txnAppId": "app", "txnVersion": str(1 << 63)}, "is not valid: it must be a whole number"),
        ({"txnAppId": "app", "txnVersion": "1", "delivery": "at-least-once"}, "require delivery=exactly-once"),
    ],
)
def test_a_wrong_option_of_a_write_gets_one_clear_sentence(given: dict[str, str | None], says: str) -> None:
    options = {name: text for name, text in ({**SERVERS, "topic": "out"} | given).items() if text is not None}
    with pytest.raises(InvalidArgument) as raised:
        sink_options.parse_sink(options)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", [{"txnAppId": "app", "txnVersion": "1"}, {"txnVersion": "1"}])
def test_a_stream_has_no_versions_of_its_users(given: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="txnAppId and txnVersion are for batch writes, such as those in foreach"):
        sink_options.parse_sink({**SERVERS, "topic": "out", **given}, stream=True)
    assert sink_options.parse_sink({**SERVERS, "topic": "out"}, stream=True).exactly_once


def test_the_docs_table_has_every_option_once() -> None:
    rows = options.markdown().splitlines()
    assert len(rows) == len(options.OPTIONS) + 2
    for option in options.OPTIONS:
        assert sum(f"| `{option.name}` |" in row for row in rows) == 1
    assert len({row.count("|") for row in rows}) == 1
