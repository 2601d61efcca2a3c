"""Options of a read: text to typed values, and one clear sentence for each mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafkalog.errors import InvalidArgument
from kafkalog.records import TopicPartition
from pyspark_kafkalog.offsets import EARLIEST, LATEST
from pyspark_kafkalog.options import OPTIONS, markdown
from pyspark_kafkalog.options import READ as READS
from pyspark_kafkalog.read.options import Selection, parse_source

SERVERS = {"kafkalog.bootstrap.servers": "one:9192, two:9194"}
READ = {**SERVERS, "subscribe": "flights"}


def test_a_read_with_nothing_but_the_needful_has_the_connectors_defaults() -> None:
    parsed = parse_source(READ)
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


def documented_defaults() -> dict[str, str]:
    cells = [[cell.strip() for cell in row.split("|")] for row in markdown().splitlines()[2:]]
    return {cell[1].strip("`"): cell[3] for cell in cells}


@pytest.mark.parametrize(
    "name", [each.name for each in OPTIONS if not set(READS).isdisjoint(each.used_by) and isinstance(each.default, str)]
)
@pytest.mark.parametrize("more", [{}, {"startingTimestamp": "0"}])  # the strategy counts only for a start by time
def test_an_option_that_is_not_given_has_its_documented_default(name: str, more: dict[str, str]) -> None:
    parsed = parse_source({**READ, **more})
    explicit = parse_source({**READ, **more, name: documented_defaults()[name]})
    assert explicit.given == parsed.given | {name}
    assert replace(explicit, given=parsed.given, end=parsed.end) == parsed
    assert explicit.batch_bounds() == parsed.batch_bounds()


def test_the_documented_start_of_a_batch_and_of_a_stream_is_where_they_start() -> None:
    batch, stream = documented_defaults()["startingOffsets"].removeprefix("batch: ").split(", stream: ")
    parsed = parse_source(READ)
    assert parse_source({**READ, "startingOffsets": batch}).batch_bounds() == parsed.batch_bounds()
    assert parse_source({**READ, "startingOffsets": stream}).stream_start() == parsed.stream_start()


def test_names_are_compared_without_case() -> None:
    parsed = parse_source({**SERVERS, "subscribepattern": "fl.*", "MAXOFFSETSPERTRIGGER": "7"})
    assert parsed.selection.matches("flights")
    assert parsed.max_offsets_per_trigger == 7


def test_everything_given_is_parsed() -> None:
    parsed = parse_source(
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


def test_a_pattern_is_searched_for_in_a_name() -> None:
    """As by `findFirstIn` in Spark's Kafka connector."""
    selection = parse_source({**SERVERS, "subscribePattern": "fl.*|^b$"}).selection
    assert [topic for topic in ("flights", "b", "ab", "in-flight", "bb") if selection.matches(topic)] == [
        "flights",
        "b",
        "in-flight",
    ]


def test_the_topics_of_assigned_partitions_come_once_each_and_sorted() -> None:
    assert parse_source({**SERVERS, "assign": '{"t": [1, 0], "a": [3]}'}).selection.topics() == ("a", "t")


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
        ({**READ, "startingOffsets": "now"}, "'now' is not valid; expected earliest, latest, committed or {"),
        ({**READ, "endingOffsets": "now"}, "endingOffsets='now' is not valid; expected earliest, latest or {"),
        ({**READ, "includeHeaders": "yes"}, "it must be true or false"),
        ({**READ, "maxOffsetsPerTrigger": "0"}, "it must be a whole number of at least 1"),
        ({**READ, "maxOffsetsPerTrigger": "many"}, "it must be a whole number of at least 1"),
        ({**READ, "kafkaConsumer.pollTimeoutMs": str(1 << 31)}, "it must be a number of milliseconds, at least 1"),
    ],
)
def test_a_wrong_option_of_a_read_gets_one_clear_sentence(given: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse_source(given)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "topics"),
    [
        ({"path": "b, a"}, ("a", "b")),
        ({"paths": '["b", "a"]'}, ("a", "b")),
        ({"path": "a", "subscribe": " a"}, ("a",)),
    ],
)
def test_the_argument_of_load_is_what_is_subscribed_to(given: dict[str, str], topics: tuple[str, ...]) -> None:
    parsed = parse_source({**SERVERS, **given})
    assert parsed.selection == Selection("subscribe", topics)
    assert parsed.group == parse_source({**SERVERS, "subscribe": ",".join(topics)}).group


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
        parse_source({**SERVERS, **given})
    assert says in str(raised.value)
