"""Every setting of the client, one row each, and how a call's arguments become them.

A call takes settings as keywords in snake_case (`linger_ms=5`) or dotted (`**{"linger.ms": 5}`). Knows nothing of
connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kafkalog.config import Setting, Table, Values, anything, between, one_of
from kafkalog.errors import InvalidSetting

_MIB = 1 << 20
INT_MAX = (1 << 31) - 1  # what the wire, the kernel's timeouts and Kafka's own ints take
LONG_MAX = (1 << 63) - 1  # what Kafka's users write for "for ever"; waits are cut to what threads can wait

_CONNECTION_SETTINGS = [
    Setting("connect.timeout.ms", int, 5_000, between(1, INT_MAX), "How long one address may take to accept and greet."),
    Setting("request.timeout.ms", int, 30_000, between(1, INT_MAX),
            "How long a request may stay unanswered before its connection is given up."),
    Setting("bootstrap.timeout.ms", int, 5_000, between(0, INT_MAX),
            "How long the bootstrap servers are tried again before the first of them ever answered; 0: once each."),
    Setting("retry.timeout.ms", int, 30_000, between(0, INT_MAX),
            "How long brokers that once answered are tried again while they are unreachable, before a call or a consumer fails."),
    Setting("retry.backoff.ms", int, 50, between(1, INT_MAX), "Pause before a failed request is tried again; doubles each time."),
    Setting("retry.backoff.max.ms", int, 1_000, between(1, INT_MAX), "Longest such pause."),
    Setting("metadata.max.age.ms", int, 300_000, between(1, LONG_MAX),
            "Age at which what is known of a topic is asked again, so that new partitions are noticed."),
]  # fmt: skip


CLIENT_SETTINGS = Table("client", _CONNECTION_SETTINGS)


def _check_producer(values: Values) -> tuple[str, str] | None:
    if values.enable_idempotence and values.acks == "0" and "enable.idempotence" in values.given():
        return "enable.idempotence", "acks=0 has no answers to be idempotent by"
    if values.delivery_timeout_ms < values.linger_ms:
        return "delivery.timeout.ms", f"it must be at least linger.ms ({values.linger_ms})"
    return None


PRODUCER_SETTINGS = Table(
    "producer",
    [
        Setting("acks", str, "1", one_of("0", "1", "all"),
                "0: not answered, a record may be lost unnoticed; 1: the leader has it; all: every in-sync replica has it."),
        Setting("linger.ms", int, 5, between(0, INT_MAX),
                "How long a batch waits for more records. Larger: bigger batches, later delivery."),
        Setting("batch.size", int, 2_500_000, between(1, 1 << 30),
                "Bytes at which a batch is sent without lingering; a topic's max.message.bytes bounds it too."),
        Setting("batch.records", int, 10_000, between(1, INT_MAX), "Records at which a batch is sent without lingering."),
        Setting("compression.type", str, "none", one_of("none", "lz4", "zstd"), "How batches are compressed."),
        Setting("buffer.memory", int, 64 * _MIB, between(1024, LONG_MAX),
                "Bytes of records not yet acknowledged; while it is full, send() blocks."),
        Setting("max.block.ms", int, 60_000, between(0, LONG_MAX),
                "How long send() may block for room in the buffer."),
        Setting("max.in.flight.requests", int, 100, between(1, INT_MAX),
                "Batches of one partition sent and not yet acknowledged; at most the brokers' producer.batches.remembered."),
        Setting("max.request.size", int, 1_000_000, between(1024, INT_MAX),
                "Bytes of batches put into one request, but for a single larger batch. Brokers take up to 1 MiB at once best."),
        Setting("delivery.timeout.ms", int, 120_000, between(1, LONG_MAX),
                "How long a record may take from send() to its ack, retries included."),
        Setting("enable.idempotence", bool, True, anything,
                "Retries neither double nor reorder records. Always off with acks=0."),
        Setting("transaction.commit.timeout.ms", int, 120_000, between(1, LONG_MAX),
                "How long a commit of staged rows goes on while nothing is done for it in any partition, before it fails; "
                "what was decided by then is finished by the brokers."),
        *_CONNECTION_SETTINGS,
    ],
    _check_producer,
)  # fmt: skip

CONSUMER_SETTINGS = Table(
    "consumer",
    [
        Setting("fetch.min.bytes", int, 1, between(0, INT_MAX),
                "A broker answers once it has that much. Larger: fewer, fuller answers, later."),
        Setting("fetch.max.wait.ms", int, 500, between(0, INT_MAX), "Longest that a broker waits for fetch.min.bytes."),
        Setting("fetch.max.bytes", int, 8 * _MIB, between(1, INT_MAX), "Most bytes in one answer, but for a first batch that is larger."),
        Setting("max.partition.fetch.bytes", int, 4 * _MIB, between(1, INT_MAX), "The same for each partition in it."),
        Setting("auto.offset.reset", str, "error", one_of("error", "earliest", "latest"),
                "Where to go on when the offset to read is not in the log (any more): nowhere, its start, or its end."),
        Setting("committed.fallback", str, "error", one_of("error", "earliest", "latest"),
                "Where 'committed' starts in a partition for which the group has committed nothing."),
        *_CONNECTION_SETTINGS,
    ],
    elsewhere={"group.id": "it is the argument group, as Consumer(servers, group='name')"},
)  # fmt: skip


def connection_settings(values: Values) -> Values:
    """The part of a producer's or consumer's settings that is about connections."""
    return CLIENT_SETTINGS.parse({name: value for name, value in values.given().items() if name in CLIENT_SETTINGS})


def parse_producer(given: Mapping[str, Any]) -> Values:
    """A producer's settings; acks may also be the number 0, 1 or -1."""
    acks = given.get("acks")
    if isinstance(acks, int) and not isinstance(acks, bool):
        given = {**given, "acks": "all" if acks == -1 else str(acks)}
    elif acks == "-1":
        given = {**given, "acks": "all"}
    return PRODUCER_SETTINGS.parse(given)


Partitioner = Callable[["bytes | None", int], int]
"""(key, number of partitions) -> partition."""


def parse_bootstrap(servers: str | Iterable[str]) -> list[tuple[str, int]]:
    """(host, port) of each `host:port`; `[...]` around an IPv6 host.

    Raises:
        InvalidSetting: what is no `host:port`.
    """
    if not isinstance(servers, Iterable):
        raise InvalidSetting(name="bootstrap.servers", value=str(servers), reason="it must be host:port, as text")
    texts = servers.split(",") if isinstance(servers, str) else list(servers)
    addresses = []
    for text in (str(text).strip() for text in texts):
        host, colon, port = text.rpartition(":")
        in_brackets = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if in_brackets else host
        is_host = host and "/" not in host and (in_brackets or ":" not in host)
        if not colon or not is_host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidSetting(
                name="bootstrap.servers",
                value=text or str(servers),
                reason="it must be host:port, or several with commas between",
            )
        addresses.append((host, int(port)))
    if not addresses:
        raise InvalidSetting(name="bootstrap.servers", value=str(servers), reason="it names no server")
    return addresses
