"""Members of consumer groups in ZooKeeper: who they are, what each is to read and owns. Knows no broker and no clock.

A group's own znode has all of its state: the generation, and for each member its share and its claims. Every change is
one compare-and-set of this znode (`change`): a join, a leave, a lapse, a claim, a release. So all changes of a group
have one order, and what depends on the state (a commit) names its version. A change of members, or of what they are to
read, makes the next generation; claims and releases do not.

Numbers for epochs and claims come from one counter of the group, which begins at the zxid of its znode. So they rise
for ever, also if a group is deleted and one of its name is made. The versions of that one's znode begin anew, so each
group has an *incarnation*, a child of a random name, and whatever names a version checks it too.

ZooKeeper keeps its last 500 changes in memory, so a large state is compressed.

A member has two more znodes: `ids/<member>` describes it; `leases/<member>` is written again at each heartbeat. Clients
have no session of ZooKeeper's, whose end would remove them: a broker removes a member whose lease was not written for
its session timeout (`broker/groups/monitor.py`).
"""

from __future__ import annotations

import random
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from kafkalog.errors import GroupTooLarge, UnreadableZnode
from kafkalog.patterns import matcher
from kafkalog.records import TopicPartition, by_topic, ranges
from kafkalog.zk import paths
from kafkalog.zk.content import fields_of, to_json, unknown_in
from kafkalog.zk.session import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    NodeExists,
    Operation,
    Set,
    Watch,
    ZooKeeperSession,
)

CONSUMER = "consumer"
"""The kind of a member that is assigned partitions."""
STREAM = "stream"
"""The kind of a member that publishes the position of a Spark stream. It is assigned nothing; the first member's
offsets are written."""

STATE_BYTES_MAX = 400_000
"""Of a group's znode. ZooKeeper keeps its last 500 changes in memory, whose default is 1 GB."""
_COMPRESSED_FROM = 10_000
"""A smaller state stays readable in ZooKeeper's own shell."""

SESSION_TIMEOUT_MS = 10_000
"""Of members that name none."""


class Member(NamedTuple):
    """How a member describes itself.

    Attributes:
        name: unique in its group.
        topics, pattern: what it subscribes to: names, or a regular expression that a whole name matches.
        subscription: what it reads, for people.
        host, process, client_id: whose it is.
        instance_id: its static name, `group.instance.id`; empty: it has none.
        session_timeout_ms: how long it stays a member after its last heartbeat.
        since_ms: when it joined first, by ZooKeeper's clock.
        unknown: the fields of its znode that this version does not know.
    """

    name: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    subscription: str = ""
    host: str = ""
    process: str = ""
    client_id: str = ""
    instance_id: str = ""
    session_timeout_ms: int = SESSION_TIMEOUT_MS
    since_ms: int = 0
    unknown: Mapping[str, Any] = {}


def topics_read(members: Mapping[str, Member], topics: Iterable[str]) -> dict[str, list[str]]:
    """Those of the topics to which each member subscribes. A pattern that many members have is matched once."""
    listed = list(topics)
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for member in members.values():
        key = (member.pattern, member.topics)
        if key in found:
            continue
        if member.pattern:
            matches = matcher(member.pattern)
            found[key] = [topic for topic in listed if matches(topic)]
        else:
            wanted = set(member.topics)
            found[key] = [topic for topic in listed if topic in wanted]
    return {name: found[member.pattern, member.topics] for name, member in members.items()}


class Topic(NamedTuple):
    """A topic as a generation sees it: its id and number of partitions."""

    topic_id: bytes
    partitions: int


class Seat(NamedTuple):
    """A member in its group.

    Attributes:
        epoch: the number of its join: another process that joins under its name has another one.
        share: what it is to read.
        claims: what it owns, and the number of each claim.
    """

    epoch: int
    share: frozenset[TopicPartition] = frozenset()
    claims: Mapping[TopicPartition, int] = {}


@dataclass(frozen=True)
class GroupState:
    """A group at one moment.

    Attributes:
        generation: rises with each change of members or shares; 0: the group never had a member.
        kind: of its members.
        assignor: by which the shares were made.
        seats: by member, in the order in which they joined.
        topics: those that members read or have read, by name: what such a topic has more when somebody reads it again
            is new to the group. One that was deleted has no partitions, and so all of one that is made anew under its
            name are new. The last ones that were deleted come last.
        number: the last one that was given to a join or a claim.
        incarnation: random; empty: the znode was not made by `make_group`, and the first change makes one.
        version: of the group's znode; -1: it does not exist.
        unknown: the fields of the znode that this version does not know.
    """

    generation: int = 0
    kind: str = ""
    assignor: str = ""
    seats: Mapping[str, Seat] = field(default_factory=dict)
    topics: Mapping[str, Topic] = field(default_factory=dict)
    number: int = 0
    incarnation: str = ""
    version: int = -1
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def owners(self) -> Mapping[TopicPartition, str]:
        """The owner of each partition that is owned."""
        return {partition: name for name, seat in self.seats.items() for partition in seat.claims}

    def first(self) -> str | None:
        """The member that joined first."""
        return next(iter(self.seats), None)

    def with_seat(self, name: str, seat: Seat) -> GroupState:
        """The state with another seat of a member; a new member is the last one."""
        return replace(self, seats={**self.seats, name: seat})


class Lease(NamedTuple):
    """A member's lease: it is renewed when its version rises."""

    version: int
    renewed_ms: int
    session_timeout_ms: int


# --- contents --------------------------------------------------------------------------------------------------------

_STATE_FIELDS = frozenset({"generation", "kind", "assignor", "members", "topics", "names", "number", "incarnation"})
_MEMBER_TEXTS = ("pattern", "subscription", "host", "process", "client_id", "instance_id")


def _state_to_bytes(state: GroupState) -> bytes:
    names: dict[str, int] = {}  # of topics, each is written once

    def listed(partitions: Iterable[TopicPartition]) -> list[list[int | str]]:
        """Partitions by topic as text: [0, "0-3,7"]."""
        return [
            [names.setdefault(topic, len(names)), ranges(numbers)] for topic, numbers in by_topic(partitions).items()
        ]

    seats = []
    for name, seat in state.seats.items():
        claims: dict[int, list[TopicPartition]] = {}
        for partition, number in seat.claims.items():
            claims.setdefault(number, []).append(partition)
        by_number = [[number, listed(partitions)] for number, partitions in claims.items()]
        seats.append([name, seat.epoch, listed(seat.share), by_number])
    topics = [
        [names.setdefault(name, len(names)), topic.topic_id.hex(), topic.partitions]
        for name, topic in state.topics.items()
    ]
    content = to_json(
        {
            **state.unknown,
            "generation": state.generation,
            "kind": state.kind,
            "assignor": state.assignor,
            "members": seats,
            "topics": topics,
            "names": list(names),
            "number": state.number,
            "incarnation": state.incarnation,
        }
    )
    return content if len(content) < _COMPRESSED_FROM else zlib.compress(content, 1)


def _parse_state(path: str, content: bytes, version: int, zxid: int) -> GroupState:
    if not content:  # it never had a member
        return GroupState(number=zxid, version=version)
    with fields_of(path, _unpacked(path, content)) as fields:
        names = list(map(str, fields["names"]))

        def partitions(listed: Iterable[tuple[int, str]]) -> Iterator[TopicPartition]:
            for index, text in listed:
                for each in text.split(","):
                    first, _, last = each.partition("-")
                    for number in range(int(first), int(last or first) + 1):
                        yield TopicPartition(names[index], number)

        seats = {}
        for name, epoch, share, claims in fields["members"]:
            numbers = {partition: int(number) for number, listed in claims for partition in partitions(listed)}
            seats[str(name)] = Seat(int(epoch), frozenset(partitions(share)), numbers)
        topics = {names[index]: Topic(bytes.fromhex(id_), int(count)) for index, id_, count in fields["topics"]}
        return GroupState(
            int(fields["generation"]),
            str(fields["kind"]),
            str(fields["assignor"]),
            seats,
            topics,
            int(fields["number"]) or zxid,
            str(fields["incarnation"]),
            version,
            unknown_in(fields, _STATE_FIELDS),
        )


def _unpacked(path: str, content: bytes) -> bytes:
    if content.startswith(b"{"):
        return content
    try:
        return zlib.decompress(content)
    except zlib.error as error:
        raise UnreadableZnode(path=path, reason=f"it is neither JSON nor compressed: {error}") from None


def _member_to_json(member: Member) -> bytes:
    fields = member._asdict()
    del fields["name"], fields["since_ms"], fields["unknown"]
    return to_json({**member.unknown, **fields, "topics": list(member.topics)})


def _parse_member(name: str, path: str, content: bytes, since_ms: int) -> Member:
    with fields_of(path, content) as fields:
        texts = {each: str(fields.get(each, "")) for each in _MEMBER_TEXTS}
        topics = tuple(map(str, fields.get("topics", ())))
        timeout_ms = int(fields.get("session_timeout_ms", SESSION_TIMEOUT_MS))
        unknown = unknown_in(fields, {*_MEMBER_TEXTS, "topics", "session_timeout_ms"})
    return Member(name, topics, **texts, session_timeout_ms=timeout_ms, since_ms=since_ms, unknown=unknown)


# --- reading ---------------------------------------------------------------------------------------------------------


def read_state(session: ZooKeeperSession, group: str, watch: Watch | None = None) -> GroupState | None:
    """A group's state; None if the group does not exist, which is not watched. Raises UnreadableZnode."""
    return read_states(session, [group], watch)[0]


def read_states(
    session: ZooKeeperSession, groups: Sequence[str], watch: Watch | None = None
) -> list[GroupState | None]:
    """The states of many groups, as `read_state`. Raises UnreadableZnode."""
    wanted = [paths.group(group) for group in groups]
    found = session.get_many(wanted, watch, watch_missing=False)
    return [
        None if each is None else _parse_state(path, each[0], each[1].version, each[1].czxid)
        for path, each in zip(wanted, found, strict=True)
    ]


def read_members(session: ZooKeeperSession, group: str, names: Iterable[str]) -> dict[str, Member]:
    """Those of these members that have a znode, in the order of the names. Raises UnreadableZnode."""
    names = list(names)
    wanted = [paths.group_member(group, name) for name in names]
    found = session.get_many(wanted)
    return {
        name: _parse_member(name, path, each[0], each[1].ctime)
        for name, path, each in zip(names, wanted, found, strict=True)
        if each is not None
    }


def read_leases(session: ZooKeeperSession, members: Sequence[tuple[str, str]]) -> list[Lease | None]:
    """The leases of members, given as (group, member); None for one that has none. Raises UnreadableZnode."""
    wanted = [paths.group_lease(group, name) for group, name in members]
    leases: list[Lease | None] = []
    for path, found in zip(wanted, session.get_many(wanted), strict=True):
        if found is None:
            leases.append(None)
            continue
        content, stat = found
        with fields_of(path, content) as fields:
            leases.append(Lease(stat.version, stat.mtime, int(fields["session_timeout_ms"])))
    return leases


def now_ms(session: ZooKeeperSession) -> int:
    """The time by ZooKeeper's clock, by which leases are stamped."""
    return session.set(paths.CONSUMERS, b"").mtime


# --- writing ---------------------------------------------------------------------------------------------------------


def change(
    session: ZooKeeperSession,
    group: str,
    before: GroupState,
    after: GroupState,
    operations: Iterable[Operation] = (),
) -> GroupState:
    """Replace a group's state as it was read, with other operations in one multi. Returns the state with its version.

    Raises:
        BadVersion, NoNode, NodeExists: something changed since it was read; nothing was written.
        GroupTooLarge
    """
    first: list[Operation] = list(guards(group, before))
    if not before.incarnation:
        after = replace(after, incarnation=uuid.uuid4().hex)
        first.append(Create(paths.group_incarnation(group, after.incarnation)))
    content = _state_to_bytes(after)
    _check_size(group, content)
    session.multi([*first, Set(paths.group(group), content, before.version), *operations])
    return replace(after, version=before.version + 1)


def check_room_for_claims(group: str, state: GroupState) -> None:
    """Raises GroupTooLarge: the state would not fit its znode if each partition was claimed by a claim of its own."""
    gaps, number, seats = random.Random(0), state.number, {}
    for name, seat in state.seats.items():
        claims = {}
        for partition in seat.share:
            number += gaps.randrange(1, 1000)  # as those of a group that is old: these take the most
            claims[partition] = number
        seats[name] = seat._replace(claims=claims)
    _check_size(group, _state_to_bytes(replace(state, seats=seats)))


def _check_size(group: str, content: bytes) -> None:
    if len(content) > STATE_BYTES_MAX:
        raise GroupTooLarge(group=group, size=len(content), limit=STATE_BYTES_MAX)


def make_group(session: ZooKeeperSession, group: str) -> None:
    """Make what is missing of a group's znodes above its members'."""
    if session.exists(paths.group(group)) is None:
        state = GroupState(incarnation=uuid.uuid4().hex)
        with suppress(NodeExists):
            session.multi(
                [
                    Create(paths.group(group), _state_to_bytes(state)),
                    Create(paths.group_incarnation(group, state.incarnation)),
                ]
            )
    session.ensure([paths.group_members(group), paths.group_leases(group)])


def guards(group: str, state: GroupState) -> list[Check]:
    """Operations that fail a multi if the group has another state by then."""
    checks = [Check(paths.group(group), state.version)]
    if state.incarnation:
        checks.append(Check(paths.group_incarnation(group, state.incarnation), 0))
    return checks


def prove(session: ZooKeeperSession, group: str, state: GroupState) -> None:
    """Do nothing if a group has this state now. ZooKeeper's leader orders each multi, so this sees what any broker has
    written; a mere read need not.

    Raises:
        BadVersion, NoNode, NodeExists: it has another one.
    """
    if state.version >= 0:
        session.multi(guards(group, state))
        return
    session.multi([Check(paths.CONSUMERS, ANY_VERSION)])  # a read after it sees as much
    if session.exists(paths.group(group)) is not None:
        raise NodeExists


def create_member(group: str, member: Member) -> list[Operation]:
    """Operations that describe a new member, and begin its lease."""
    return [
        Create(paths.group_member(group, member.name), _member_to_json(member)),
        Create(paths.group_lease(group, member.name), _lease(member.session_timeout_ms)),
    ]


def describe_member(group: str, member: Member) -> list[Operation]:
    """Operations that describe a known member anew, and renew its lease."""
    return [
        Set(paths.group_member(group, member.name), _member_to_json(member)),
        Set(paths.group_lease(group, member.name), _lease(member.session_timeout_ms)),
    ]


def delete_member(group: str, name: str, lease_version: int = ANY_VERSION) -> list[Operation]:
    """Operations that remove a member; with a lease's version, only if it was not renewed since."""
    return [
        Delete(paths.group_member(group, name)),
        Delete(paths.group_lease(group, name), lease_version),
    ]


def _lease(session_timeout_ms: int) -> bytes:
    return to_json({"session_timeout_ms": session_timeout_ms})


def renew(session: ZooKeeperSession, group: str, name: str, session_timeout_ms: int) -> None:
    """Renew a member's lease. Raises NoNode: there is no such member."""
    session.set(paths.group_lease(group, name), _lease(session_timeout_ms))
