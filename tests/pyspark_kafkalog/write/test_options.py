"""Options of a write: text to typed values, and one clear sentence for each mistake."""

from __future__ import annotations

import pytest

from kafkalog.errors import InvalidArgument, InvalidSetting
from pyspark_kafkalog.options import markdown
from pyspark_kafkalog.read.options import parse_source
from pyspark_kafkalog.write.options import parse_sink

SERVERS = {"kafkalog.bootstrap.servers": "one:9192, two:9194"}


@pytest.mark.parametrize("acks", ["-1", "all", "1", "0"])
def test_acks_are_what_a_producer_takes(acks: str) -> None:
    assert parse_sink({**SERVERS, "kafka.acks": acks}).client == {"acks": acks}
    with pytest.raises(InvalidSetting, match="acks='2' is not valid"):
        parse_sink({**SERVERS, "kafka.acks": "2"})


def test_a_writes_checkpoint_is_an_option_of_writes_that_reads_ignore() -> None:
    write = {**SERVERS, "topic": "t"}
    for stream in (False, True):
        assert parse_sink(write, stream=stream).checkpoint is None
        sink = parse_sink({**write, "CheckpointLocation": "s3a://b/a folder"}, stream=stream)
        assert sink.checkpoint == "s3a://b/a folder"
    with pytest.raises(InvalidArgument, match="the option checkpointLocation is empty"):
        parse_sink({**write, "checkpointLocation": " "})
    assert (
        "checkpointLocation" not in parse_source({**SERVERS, "subscribe": "flights", "checkpointLocation": " "}).given
    )


def test_the_argument_of_save_is_the_topic() -> None:
    assert parse_sink({**SERVERS, "path": "flights"}).topic == "flights"
    assert parse_sink({**SERVERS, "path": "flights", "topic": "flights"}).topic == "flights"
    with pytest.raises(InvalidArgument, match="'a', the argument of save or start, and the option topic=b differ"):
        parse_sink({**SERVERS, "path": "a", "topic": "b"})
    with pytest.raises(InvalidArgument, match="'a/b', the argument of save or start, is no topic's name"):
        parse_sink({**SERVERS, "path": "a/b"})


def test_client_settings_are_passed_on_and_ours_beat_kafkas() -> None:
    parsed = parse_sink(
        {**SERVERS, "kafka.linger.ms": "5", "kafkalog.linger.ms": "6", "kafka.compression.type": "lz4", "kafka.x": "1"}
    )
    assert parsed.client == {"linger.ms": "6", "compression.type": "lz4"}


def test_a_write_needs_only_servers() -> None:
    assert parse_sink(SERVERS).topic is None
    assert parse_sink({**SERVERS, "topic": " out "}).topic == "out"
    with pytest.raises(InvalidArgument, match="topic is empty"):
        parse_sink({**SERVERS, "topic": " "})


def test_a_write_has_the_documented_delivery() -> None:
    (row,) = (row for row in markdown().splitlines() if row.startswith("| `delivery` |"))
    assert parse_sink({**SERVERS, "delivery": row.split("|")[3]}) == parse_sink(SERVERS)


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
    parsed = parse_sink({**SERVERS, "topic": "out", **given})
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
        parse_sink(options)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", [{"txnAppId": "app", "txnVersion": "1"}, {"txnVersion": "1"}])
def test_a_stream_has_no_versions_of_its_users(given: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="txnAppId and txnVersion are for batch writes, such as those in foreach"):
        parse_sink({**SERVERS, "topic": "out", **given}, stream=True)
    assert parse_sink({**SERVERS, "topic": "out"}, stream=True).exactly_once
