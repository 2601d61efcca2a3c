"""All paths of the znode tree. They are below the cluster's chroot (default /kafkalog), which the session adds.

    /cluster                                        {cluster_id, created_us, format_level}: created by the first broker;
                                                    nothing is written in a format of a higher level
    /brokers/ids/<id>                               ephemeral: {host, grpc_port, data_port, rack, version, directory,
                                                    lock, where, epoch, stopping, protocol: [oldest, newest], formats:
                                                    [oldest, newest]}; directory is the id of the broker's data
                                                    directory
    /brokers/epochs                                 empty; written in each change that creates a /brokers/ids/<id>, so
                                                    its version counts registrations
    /brokers/epochs/<id>                            {directory, where}: written in the same change that creates
                                                    /brokers/ids/<id>; its version is the epoch of the registration. It
                                                    is never deleted, because a znode that is made again begins with
                                                    version 0
    /controller                                     ephemeral: {broker_id, broker_epoch, epoch}: the elected controller,
                                                    its registration, and the version of /controller_epoch
    /controller_epoch                               the same, of the last controller; written in the change that creates
                                                    /controller. Each write of a controller checks its version
    /brokers/topics/<topic>                         {topic_id, config, partitions: {p: [broker ids]}, created_us},
                                                    with deleted: true while its znodes are being removed
    /brokers/topics/<topic>/<topic id>/<p>/state    {leader, leader_epoch, isr: [broker ids], eligible: [broker ids],
                                                    directories: {broker id: directory}}: created by the first replica
                                                    after it has opened the log; directories has the id of the data
                                                    directory of each replica whose log was ever opened; leader is -1
                                                    while nobody leads. Of a partition that was reassigned also
                                                    replicas: [broker ids], which then count, and not those in the
                                                    topic's znode; while it is moved, target: [broker ids] and
                                                    throttled_rate in bytes a second. <topic id> is
                                                    created and deleted with the topic, in one change.
                                                    So a late write cannot change a new topic of the
                                                    name
    /admin/deleted_topics/<topic id>                {topic, brokers}: the brokers that may still have logs of the topic
    /consumers/<group>                              {generation, kind, assignor, number, incarnation, names: [topic],
                                                    topics: [[index of the name, topic id, partitions]], members:
                                                    [[name, epoch, [[index, partitions]] to read, [[number, [[index,
                                                    partitions]]] claimed]]]}, compressed (zlib) from 10,000 bytes on;
                                                    empty: it had no member
    /consumers/<group>/incarnation-<random>         empty: a check of it and of the group's version does not hold for
                                                    another group of the name
    /consumers/<group>/ids/<member>                 {topics, pattern, subscription, host, process, client_id,
                                                    instance_id, session_timeout_ms}
    /consumers/<group>/leases/<member>              {session_timeout_ms}: written again at each heartbeat
    /consumers/<group>/offsets/<topic>/<p>          {offset, topic_id, leader_epoch, committed_us}, and {number,
                                                    order} of a commit by a member or a consumer that assigns
    /transactions/<id>                              the last decision of a transaction; `transaction` encodes its id
                                                    (docs/reference/formats.md)

Knows names only. The other modules of this package know the contents of the znodes.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

DEFAULT_CHROOT = "/kafkalog"

CLUSTER = "/cluster"
BROKER_IDS = "/brokers/ids"
BROKER_EPOCHS = "/brokers/epochs"
CONTROLLER = "/controller"
CONTROLLER_EPOCH = "/controller_epoch"
TOPICS = "/brokers/topics"
DELETED_TOPICS = "/admin/deleted_topics"
CONSUMERS = "/consumers"
TRANSACTIONS = "/transactions"
_INCARNATION = "incarnation-"

PERMANENT = (BROKER_IDS, BROKER_EPOCHS, TOPICS, DELETED_TOPICS, CONSUMERS, TRANSACTIONS)
"""Parents that every cluster has. A broker creates the missing ones when it connects."""


def broker(broker_id: int) -> str:
    return f"{BROKER_IDS}/{broker_id}"


def broker_epoch(broker_id: int) -> str:
    return f"{BROKER_EPOCHS}/{broker_id}"


def topic(name: str) -> str:
    return f"{TOPICS}/{name}"


def partitions(name: str, topic_id: bytes) -> str:
    return f"{TOPICS}/{name}/{topic_id.hex()}"


def partition(name: str, topic_id: bytes, number: int) -> str:
    return f"{partitions(name, topic_id)}/{number}"


def partition_state(name: str, topic_id: bytes, number: int) -> str:
    return f"{partition(name, topic_id, number)}/state"


_STATE = re.compile(rf"^{TOPICS}/([^/]+)/([0-9a-f]{{32}})/([0-9]+)/state$")


def partition_of_state(path: str) -> tuple[str, bytes, int] | None:
    """The topic's name, the topic's id and the number of the partition whose state is at a path; None for another
    path. The inverse of `partition_state`."""
    found = _STATE.match(path)
    return (found[1], bytes.fromhex(found[2]), int(found[3])) if found else None


def deleted_topic(topic_id: bytes) -> str:
    return f"{DELETED_TOPICS}/{topic_id.hex()}"


def group(name: str) -> str:
    return f"{CONSUMERS}/{name}"


def group_incarnation(group: str, incarnation: str) -> str:
    return f"{CONSUMERS}/{group}/{_INCARNATION}{incarnation}"


def is_group_incarnation(name: str) -> bool:
    """Whether a child of a group's znode is of an incarnation."""
    return name.startswith(_INCARNATION)


def group_members(group: str) -> str:
    return f"{CONSUMERS}/{group}/ids"


def group_member(group: str, member: str) -> str:
    return f"{CONSUMERS}/{group}/ids/{member}"


def group_leases(group: str) -> str:
    return f"{CONSUMERS}/{group}/leases"


def group_lease(group: str, member: str) -> str:
    return f"{CONSUMERS}/{group}/leases/{member}"


def group_offsets(group: str) -> str:
    return f"{CONSUMERS}/{group}/offsets"


def group_topic_offsets(group: str, topic_name: str) -> str:
    return f"{CONSUMERS}/{group}/offsets/{topic_name}"


def group_offset(group: str, topic_name: str, number: int) -> str:
    return f"{CONSUMERS}/{group}/offsets/{topic_name}/{number}"


def transaction(transactional_id: str) -> str:
    """The path of a transaction's znode. The id is percent-encoded, because an id may contain a slash, or be `.` or
    `..`, which ZooKeeper does not allow as a name."""
    name = quote(transactional_id, safe=" :@+,=")
    return f"{TRANSACTIONS}/{name.replace('.', '%2E') if not name.strip('.') else name}"


def transactional_id(znode_name: str) -> str:
    """The transactional id of a znode's name: the inverse of `transaction`."""
    return unquote(znode_name)


_NAME = re.compile(r"^[a-zA-Z0-9._-]{1,249}$")
NAME_RULE = "use 1 to 249 of the characters a-z A-Z 0-9 . _ - but not '.', '..'"


def is_valid_name(name: str) -> bool:
    """Whether a text is allowed as the name of a topic or group: it becomes the name of a znode and a part of file
    names."""
    return bool(_NAME.match(name)) and name not in (".", "..") and not name.endswith("\n")
