"""The znode tree, every path of it. All are below the cluster's chroot (default /kafkalog), which the session adds.

    /cluster                                        {cluster_id, created_us}: made by the first broker
    /brokers/ids/<id>                               ephemeral: {host, grpc_port, data_port, rack, version, directory,
                                                    lock, where}; directory is the id of its data directory
    /brokers/topics/<topic>                         {topic_id, config, partitions: {p: [broker ids]}, created_us},
                                                    with deleted: true while it is being taken down
    /brokers/topics/<topic>/<topic id>/<p>/state    {leader, leader_epoch, isr, directory}: made by the leader once its
                                                    log is open; directory is the id of the one that the log stands in.
                                                    <topic id> comes and goes with the topic, in one change: a write
                                                    that is late finds nothing of a topic made anew under the name
    /admin/deleted_topics/<topic id>                {topic, brokers}: brokers that may still hold its logs
    /consumers/<group>/offsets/<topic>/<p>          {offset, topic_id, committed_us}
    /consumers/<group>/ids/<member>                 {subscription, host, process}: live if written within 10 s, by the
                                                    time of ZooKeeper's own stamps; the lowest czxid is the first
    /transactions/<id>                              the last decision of a transaction, by its id as
                                                    `transaction` spells it (docs/reference/formats.md)

Knows names only; what stands in a znode is the business of the modules beside this one.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

DEFAULT_CHROOT = "/kafkalog"

CLUSTER = "/cluster"
BROKER_IDS = "/brokers/ids"
TOPICS = "/brokers/topics"
DELETED_TOPICS = "/admin/deleted_topics"
CONSUMERS = "/consumers"
TRANSACTIONS = "/transactions"

PERMANENT = (BROKER_IDS, TOPICS, DELETED_TOPICS, CONSUMERS, TRANSACTIONS)
"""Parents that every cluster has; made when a broker first connects."""


def broker(broker_id: int) -> str:
    return f"{BROKER_IDS}/{broker_id}"


def topic(name: str) -> str:
    return f"{TOPICS}/{name}"


def partitions(name: str, topic_id: bytes) -> str:
    return f"{TOPICS}/{name}/{topic_id.hex()}"


def partition(name: str, topic_id: bytes, number: int) -> str:
    return f"{partitions(name, topic_id)}/{number}"


def partition_state(name: str, topic_id: bytes, number: int) -> str:
    return f"{partition(name, topic_id, number)}/state"


def deleted_topic(topic_id: bytes) -> str:
    return f"{DELETED_TOPICS}/{topic_id.hex()}"


def group(name: str) -> str:
    return f"{CONSUMERS}/{name}"


def group_members(group: str) -> str:
    return f"{CONSUMERS}/{group}/ids"


def group_member(group: str, member: str) -> str:
    return f"{CONSUMERS}/{group}/ids/{member}"


def group_offsets(group: str) -> str:
    return f"{CONSUMERS}/{group}/offsets"


def group_topic_offsets(group: str, topic_name: str) -> str:
    return f"{CONSUMERS}/{group}/offsets/{topic_name}"


def group_offset(group: str, topic_name: str, number: int) -> str:
    return f"{CONSUMERS}/{group}/offsets/{topic_name}/{number}"


def transaction(transactional_id: str) -> str:
    """Percent-encoded, for an id may hold a slash, and be a dot or two, which no znode may be called."""
    name = quote(transactional_id, safe=" :@+,=")
    return f"{TRANSACTIONS}/{name.replace('.', '%2E') if not name.strip('.') else name}"


def transactional_id(znode_name: str) -> str:
    """The id that `transaction` made a znode's name of."""
    return unquote(znode_name)


_NAME = re.compile(r"^[a-zA-Z0-9._-]{1,249}$")


def is_valid_name(name: str) -> bool:
    """Whether a topic or group may be called so: it becomes a znode and part of file names."""
    return bool(_NAME.match(name)) and name not in (".", "..") and not name.endswith("\n")
