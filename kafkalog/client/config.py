"""Every setting of the client, one row each, and how a call's arguments become them.

A call takes settings as keywords in snake_case (`linger_ms=5`) or dotted (`**{"linger.ms": 5}`). Knows nothing of
connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kafkalog.config import Setting, Settings, anything, between, one_of
from kafkalog.errors import InvalidArgument, InvalidSetting
from kafkalog.retry import Backoff
from kafkalog.zk.paths import NAME_RULE, is_valid_name

_MIB = 1 << 20
INT_MAX = (1 << 31) - 1  # the limit of the wire, the kernel's timeouts and Kafka's ints
LONG_MAX = (1 << 63) - 1  # Kafka's users write it for "for ever"; waits are cut to what threads can wait


class ClientSettings(Settings, what="client"):
    """Settings of connections; producers and consumers have them too."""

    # fmt: off
    connect_timeout_ms = Setting(int, 5_000, between(1, INT_MAX), "How long one address may take to accept a connection and to answer the hello.")
    request_timeout_ms = Setting(int, 30_000, between(1, INT_MAX),
        "How long a request may stay unanswered before its connection is given up.")
    bootstrap_timeout_ms = Setting(int, 5_000, between(0, INT_MAX),
        "How long the bootstrap servers are retried before any of them has answered; 0: each is tried once.")
    retry_timeout_ms = Setting(int, 30_000, between(0, INT_MAX),
        "How long brokers that answered before are retried while they are unreachable. Then the call or the consumer fails.")
    retry_backoff_ms = Setting(int, 50, between(1, INT_MAX), "Pause before a failed request is retried. It doubles with each retry.")
    retry_backoff_max_ms = Setting(int, 1_000, between(1, INT_MAX), "Longest pause between retries.")
    metadata_max_age_ms = Setting(int, 300_000, between(1, LONG_MAX),
        "Age at which the metadata of a topic is fetched again, so that new partitions are noticed.")
    # fmt: on

    def backoff(self) -> Backoff:
        """The pauses between tries, by retry.backoff.ms and retry.backoff.max.ms."""
        return Backoff(self.retry_backoff_ms / 1000, self.retry_backoff_max_ms / 1000)


class ProducerSettings(ClientSettings, what="producer"):
    # fmt: off
    acks = Setting(str, "all", one_of("0", "1", "all"),
        "all: every in-sync replica has the record, at least min.insync.replicas of them; 1: the leader has it, and a failover may lose it; 0: no answer, and a record may be lost without an error. With one replica, all is the same as 1.")
    linger_ms = Setting(int, 5, between(0, INT_MAX),
        "How long a batch waits for more records. Larger: bigger batches, later delivery.")
    batch_size = Setting(int, 2_500_000, between(1, 1 << 30),
        "Size in bytes at which a batch is sent without lingering; rows of tables linger below 64 KiB alone. A topic's max.message.bytes is a limit too.")
    batch_records = Setting(int, 10_000, between(1, INT_MAX), "Number of records at which a batch is sent without lingering.")
    compression_type = Setting(str, "none", one_of("none", "lz4", "zstd"), "How batches are compressed.")
    buffer_memory = Setting(int, 64 * _MIB, between(1024, LONG_MAX),
        "Bytes of records that are not yet acknowledged. While the buffer is full, send() blocks.")
    max_block_ms = Setting(int, 60_000, between(0, LONG_MAX),
        "How long send() may block for room in the buffer.")
    max_in_flight_requests = Setting(int, 100, between(1, INT_MAX),
        "Batches of one partition that are sent and not yet acknowledged. At most the brokers' producer.batches.remembered.")
    max_request_size = Setting(int, 1_000_000, between(1024, INT_MAX),
        "Bytes of batches in one request. A single larger batch is sent all the same. Brokers are fastest with requests of up to 1 MiB.")
    delivery_timeout_ms = Setting(int, 120_000, between(1, LONG_MAX),
        "How long a record may take from send() to its ack, retries included.")
    enable_idempotence = Setting(bool, True, anything,
        "Whether the broker recognises batches that are sent again, so that retries neither double nor reorder records. Always off with acks=0.")
    transaction_commit_timeout_ms = Setting(int, 120_000, between(1, LONG_MAX),
        "How long a commit of staged rows continues without progress in any partition before it fails. A batch that is decided by then is completed by the brokers.")
    # fmt: on

    def conflict(self) -> tuple[str, str] | None:
        if self.enable_idempotence and self.acks == "0" and "enable.idempotence" in self.given():
            return (
                "enable.idempotence",
                "with acks=0 the broker sends no acks, so nothing can be retried: use acks=all, or remove enable.idempotence",
            )
        if self.delivery_timeout_ms < self.linger_ms:
            return "delivery.timeout.ms", f"it must be at least linger.ms ({self.linger_ms})"
        return None


_ELSEWHERE = {
    "group.id": "it is the argument group, as Consumer(servers, group='name')",
    "max.poll.records": "give consume() a number, as consumer.consume(500, timeout=1.0)",
    "consumer.timeout.ms": "give poll() or messages() a timeout in seconds, as consumer.poll(timeout=1.0)",
    "enable.auto.offset.store": (
        "a message counts as processed when the next one is asked for; to commit it at another time, set "
        "enable_auto_commit=False and call consumer.commit(message)"
    ),
}


def _valid_name(value: str) -> str | None:
    return None if is_valid_name(value) else NAME_RULE


class ConsumerSettings(ClientSettings, what="consumer", elsewhere=_ELSEWHERE):
    # fmt: off
    fetch_min_bytes = Setting(int, 1, between(0, INT_MAX),
        "A broker answers a fetch once it has this many bytes. Larger: fewer and fuller answers, later.")
    fetch_max_wait_ms = Setting(int, 500, between(0, INT_MAX), "Longest time that a broker waits for fetch.min.bytes.")
    fetch_max_bytes = Setting(int, 8 * _MIB, between(1, INT_MAX), "Largest answer to one fetch, in bytes. A first batch that is larger is sent all the same.")
    max_partition_fetch_bytes = Setting(int, 4 * _MIB, between(1, INT_MAX), "The same limit for each partition in the answer.")
    auto_offset_reset = Setting(str, "error", one_of("error", "earliest", "latest"),
        "What to do when the log does not have the offset to read, or a subscribed group has none: fail, or continue at its start or at its end.")
    enable_auto_commit = Setting(bool, True, anything,
        "Whether a subscribed consumer commits its position at auto.commit.interval.ms, when partitions are revoked, and when it is closed. A record counts once it was handed back: when the next one is asked for.")
    auto_commit_interval_ms = Setting(int, 5_000, between(1, INT_MAX), "How often a subscribed consumer commits its position.")
    session_timeout_ms = Setting(int, 10_000, between(500, 3_600_000),
        "How long a subscribed consumer stays a member of its group without a heartbeat. Then its partitions go to others.")
    heartbeat_interval_ms = Setting(int, 3_000, between(1, INT_MAX),
        "How often a subscribed consumer sends a heartbeat; at least three times in session.timeout.ms, whatever is set here.")
    max_poll_interval_ms = Setting(int, 300_000, between(1, LONG_MAX),
        "How long a subscribed consumer may take for the records that it was handed. After that it leaves the group until it asks for more.")
    group_instance_id = Setting(str, None, _valid_name,
        "A static name of this consumer in its group. If it comes back under it within session.timeout.ms, it gets its partitions again and no others move.")
    client_id = Setting(str, None, anything, "A name for this client, shown by `kafkalog groups describe`.")
    partition_assignment_strategy = Setting(str, "sticky", one_of("sticky", "range", "roundrobin"),
        "How the members of a group share partitions; the same for all of them. sticky: as few move as possible; range: consecutive ones of each topic; roundrobin: in turn.")
    committed_fallback = Setting(str, "error", one_of("error", "earliest", "latest"),
        "What to do when a consumer starts at 'committed' and its group has committed nothing for the partition: fail, or start at the log's start or at its end.")
    # fmt: on

    def conflict(self) -> tuple[str, str] | None:
        if self.heartbeat_interval_ms >= self.session_timeout_ms and "heartbeat.interval.ms" in self.given():
            return "heartbeat.interval.ms", f"it must be less than session.timeout.ms ({self.session_timeout_ms})"
        return None


def connection_settings(settings: ClientSettings) -> ClientSettings:
    """The connection settings among a producer's or consumer's settings."""
    return ClientSettings.parse(
        {name: value for name, value in settings.given().items() if name in ClientSettings.rows}
    )


def parse_producer(given: Mapping[str, object]) -> ProducerSettings:
    """A producer's settings; acks may also be the number 0, 1 or -1."""
    acks = given.get("acks")
    if isinstance(acks, int) and not isinstance(acks, bool):
        given = {**given, "acks": "all" if acks == -1 else str(acks)}
    elif acks == "-1":
        given = {**given, "acks": "all"}
    return ProducerSettings.parse(given)


Partitioner = Callable[["bytes | None", int], int]
"""(key, number of partitions) -> partition."""


def parse_bootstrap(servers: str | Iterable[str]) -> list[tuple[str, int]]:
    """(host, port) of each `host:port`; `[...]` around an IPv6 host.

    Raises:
        InvalidSetting: one is not `host:port`.
        InvalidArgument: it is a dict of settings, as Confluent's Python client takes them.
    """
    if isinstance(servers, Mapping):
        raise InvalidArgument(reason=f"settings are arguments, not a dict: write {_as_arguments(servers)}")
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


def _as_arguments(given: Mapping[object, object]) -> str:
    """What to write instead of a dict of Kafka's settings. Values of unknown ones are left out: they may be secret."""
    known = {"group.id", *ProducerSettings.rows, *ConsumerSettings.rows}
    rest = {str(name).replace("_", "."): value for name, value in given.items()}
    servers = rest.pop("bootstrap.servers", "host:port")
    arguments = [repr(servers)]
    for name, value in rest.items():
        keyword = "group" if name == "group.id" else name.replace(".", "_")
        arguments.append(f"{keyword}={value!r}" if name in known else f"{keyword}=...")
    return f"({', '.join(arguments)})"
