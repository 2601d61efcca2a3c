"""Every setting of a broker and of a topic, one row each; conf/broker.properties and the docs are made from these."""

from __future__ import annotations

from kafkalog.config import Setting, Settings, anything, at_least, between, one_of

_HOUR_MS = 3_600_000
_MIB = 1 << 20
_PARTITIONS_MAX = 40_000  # 25 bytes each with the longest broker id
_INT_MAX = (1 << 31) - 1  # ZooKeeper counts milliseconds in 32 bits


class TopicSettings(Settings, what="topic"):
    # fmt: off
    segment_bytes = Setting(int, 1 << 30, between(4096, (1 << 31) - 1),
        "Size at which a segment is closed and a new one begun. Larger: fewer files, coarser retention.")
    segment_ms = Setting(int, 7 * 24 * _HOUR_MS, at_least(1),
        "Age at which a segment is closed, so that retention can delete it.")
    index_interval_bytes = Setting(int, 64 * 1024, at_least(64),
        "Bytes of log for each index entry. Smaller: more memory, shorter scans.")
    retention_ms = Setting(int, 7 * 24 * _HOUR_MS, at_least(-1),
        "A segment is deleted this long after the last append to it; -1: never.")
    retention_bytes = Setting(int, -1, at_least(-1),
        "While a partition is larger than this, its oldest segments are deleted, but never the segment that is written to; -1: no limit.")
    cleanup_policy = Setting(str, "delete", one_of("delete"),
        "What retention does with old segments. 'compact' is not supported yet.")
    max_message_bytes = Setting(int, 8 * _MIB, between(1024, 1 << 30),
        "Largest record batch, in bytes of the whole batch. The broker's request.max.bytes is a limit too.")
    min_insync_replicas = Setting(int, 1, at_least(1),
        "With acks=all, an append is refused while fewer replicas are in sync, and what was appended is not acknowledged.")
    unclean_leader_election_enable = Setting(bool, False, anything,
        "When no in-sync replica is left, a live one that is not in sync may lead. Acknowledged records may be lost.")
    flush_messages = Setting(int, None, at_least(1),
        "The log is synced (fdatasync) after this many records; 1: before every ack, with one group commit for all that wait. Unset: the operating system decides.")
    flush_ms = Setting(int, None, at_least(1),
        "The log is synced (fdatasync) at most this long after an append. Unset: the operating system decides.")
    flush_visibility = Setting(str, "written", one_of("written", "flushed"),
        "When consumers can read a record: once it is written, or only once it is flushed (the paper's rule; needs flush.messages or flush.ms).")
    # fmt: on

    def conflict(self) -> tuple[str, str] | None:
        if self.flush_visibility == "flushed" and self.flush_messages is None and self.flush_ms is None:
            return (
                "flush.visibility",
                "'flushed' requires flush.messages or flush.ms; otherwise records would never be readable",
            )
        return None


def _is_every_address(host: str) -> bool:
    """Whether a socket bound to this host accepts connections to all addresses of the machine: 0.0.0.0, ::, or
    empty."""
    return not host.strip("0.:")


def _named(path: str) -> str | None:
    if not path.strip():
        return "it must name a directory"
    return "~ is not expanded: write the whole path" if path.startswith("~") else None


_IS_A_TOPICS = (
    "it is a setting of topics: kafkalog topics create TOPIC --config NAME=VALUE, or topics alter TOPIC --set"
)


_ADDRESSES = "give host, advertised.host, grpc.port and data.port"
_ELSEWHERE = {
    **dict.fromkeys(TopicSettings.rows, _IS_A_TOPICS),
    "listeners": _ADDRESSES,  # Kafka's
    "advertised.listeners": _ADDRESSES,
}


class BrokerSettings(Settings, what="broker", elsewhere=_ELSEWHERE):
    # fmt: off
    broker_id = Setting(int, 0, at_least(0), "The broker's number, unique within the cluster.")
    log_dir = Setting(str, "data", _named, "Directory of the logs. Each broker needs a directory of its own.")
    zookeeper_connect = Setting(str, "127.0.0.1:2181", anything,
        "Addresses of the ZooKeeper ensemble, host:port,host:port, followed by the cluster's chroot if it is not /kafkalog.")
    zookeeper_session_timeout_ms = Setting(int, 10_000, between(1000, _INT_MAX),
        "ZooKeeper removes a broker from the list of live brokers after this long without a heartbeat.")
    zookeeper_connection_timeout_ms = Setting(int, 15_000, between(100, _INT_MAX),
        "How long a starting broker waits for ZooKeeper.")
    host = Setting(str, "127.0.0.1", anything, "Address that both ports are bound to.")
    advertised_host = Setting(str, None, anything, "Address that is reported to clients. Unset: the value of host. Required if host is 0.0.0.0 or ::, because clients cannot connect to that.")
    grpc_port = Setting(int, 9192, between(0, 65535), "Port of the gRPC service; 0 takes a free port.")
    data_port = Setting(int, 9193, between(0, 65535), "Port for appends and fetches; 0 takes a free port.")
    data_local_socket = Setting(bool, True, anything,
        "If host is 127.0.0.1, localhost or all addresses: serve the data port also over a Unix socket, which clients on this machine use by themselves. Appends take a third of the processor time of loopback, and fetches two thirds.")
    rack = Setting(str, None, anything, "Location of the broker (rack or zone), reported to clients.")
    num_partitions = Setting(int, 1, between(1, _PARTITIONS_MAX), "Partitions of a topic that is created without a number.")
    default_min_insync_replicas = Setting(int, 1, at_least(1),
        "min.insync.replicas of a topic with several replicas that is created without it, but at most their number.")
    default_replication_factor = Setting(int, 1, at_least(1),
        "Replicas of each partition of a topic that is created without a number.")
    max_partitions_per_topic = Setting(int, 10_000, between(1, _PARTITIONS_MAX),
        "A topic with more partitions is refused. At most 40000: a topic is one znode, and ZooKeeper takes 1 MB.")
    max_connections = Setting(int, 1000, at_least(1), "Data port connections at the same time. A further one gets an error and is closed. Other brokers, which come to copy, may have a few more.")
    request_max_bytes = Setting(int, 32 * _MIB, between(1024, 1 << 30), "Largest request body. A larger one is refused.")
    queued_max_request_bytes = Setting(int, 64 * _MIB, at_least(1024),
        "Request bytes in memory over all connections. When they are used up, connections wait before they read more.")
    fetch_max_bytes = Setting(int, 64 * _MIB, at_least(1024), "Largest answer to one fetch. A first batch that is larger is sent all the same.")
    fetch_max_wait_ms = Setting(int, 30_000, at_least(0), "Longest time that a fetch waits for min_bytes, whatever the client asks for.")
    pull_max_bytes = Setting(int, 4 * _MIB - 65536, at_least(1024), "Largest inline answer over gRPC.")
    send_timeout_ms = Setting(int, 30_000, at_least(1), "A client that accepts no byte of its answer for this long is disconnected.")
    connections_max_idle_ms = Setting(int, 600_000, at_least(1), "A data connection without a request for this long is closed.")
    log_retention_check_interval_ms = Setting(int, 60_000, at_least(1), "How often segments are checked for retention and for rolls by age.")
    disk_stall_timeout_ms = Setting(int, 60_000, between(0, _INT_MAX),
        "The broker's process ends, with exit code 75, if a single call to the disk of log.dir has not returned after this long: other replicas lead then. 0: never.")
    scrub_bytes_per_second = Setting(int, 8 * _MIB, at_least(0),
        "How fast closed segments are read to find bit rot, which is then repaired from another replica. 0: they are not read; damage that a reader meets is still repaired.")
    scrub_interval_ms = Setting(int, 7 * 24 * _HOUR_MS, at_least(1),
        "How long after the beginning of a round of scrubbing the next one begins, if it is over by then.")
    producer_id_expiration_ms = Setting(int, 24 * _HOUR_MS, at_least(1), "The sequence state of a producer that sends nothing for this long is forgotten.")
    producer_state_max = Setting(int, 10_000, at_least(1),
        "Producers whose sequence state a partition keeps: 300 B each, and 32 B for each batch in the deduplication window. Beyond that, the producer that was silent longest is forgotten; if all wrote within 5 minutes, a new producer has to wait.")
    producer_batches_remembered = Setting(int, 128, between(5, 10_000),
        "Length of the deduplication window: the last batches of a producer, which are recognised when they are sent again. At least a producer's max.in.flight.requests.")
    transaction_timeout_ms = Setting(int, 24 * _HOUR_MS, at_least(1),
        "A prepared exactly-once batch that is not decided is dropped after this long.")
    transaction_staged_retention_ms = Setting(int, 24 * _HOUR_MS, at_least(1),
        "Staged rows of an exactly-once write that are never prepared are dropped this long after the last report of any of its tasks.")
    replica_lag_time_max_ms = Setting(int, 10_000, at_least(100),
        "A follower that has not caught up with its leader for this long leaves the in-sync set.")
    leader_rebalance_interval_ms = Setting(int, 300_000, at_least(1),
        "The first replica of a partition leads it again after it has been in sync for this long.")
    log_level = Setting(str, "info", one_of("debug", "info", "warning", "error"), "What the broker logs to stderr: events of this level and above.")
    exit_with_stdin = Setting(bool, False, anything,
        "Stop when standard input closes, so that the broker ends with the process that started it.")
    # fmt: on

    def conflict(self) -> tuple[str, str] | None:
        if _is_every_address(self.host if self.advertised_host is None else self.advertised_host):
            return ("host" if self.advertised_host is None else "advertised.host"), (
                "a client that connects to it reaches its own machine; set advertised.host to a name or address at which "
                "clients reach this one"
            )
        if self.queued_max_request_bytes < self.request_max_bytes:
            return "queued.max.request.bytes", f"it must be at least request.max.bytes ({self.request_max_bytes})"
        return None
