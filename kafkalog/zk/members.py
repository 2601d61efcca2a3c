"""Live members of a group. Each has a znode that is a lease: the member is live while its znode is rewritten. Knows no
offset and no broker.

A lease is needed because clients have no ZooKeeper session, whose end would remove an ephemeral znode, and a broker's
session does not depend on the client. Any broker that the member reaches renews the lease, so nothing has to be handed
over when a broker dies. All times are ZooKeeper's own stamps, so clocks of brokers and clients are never compared: the
current time is the stamp of a write made just before. Members are ordered by the creation of their znodes (czxid). A
member whose lease has ended is removed by the next reader. If it returns, it is the last in the order.
"""

from __future__ import annotations

from typing import NamedTuple

from kafkalog.errors import UnreadableZnode
from kafkalog.events import get_logger
from kafkalog.zk import paths
from kafkalog.zk.content import fields_of, to_json
from kafkalog.zk.session import BadVersion, NodeExists, NoNode, ZooKeeperSession

log = get_logger(__name__)

LEASE_MS = 10_000
"""A member is live this long after the last write of its znode."""

_ATTEMPTS = 5
_FIELDS = ("subscription", "host", "process")


class Member(NamedTuple):
    """A live member.

    Attributes:
        subscription: what the member reads.
        host, process: the member's process, and the host on which it runs.
        since_ms: creation time of its znode.
        left_ms: time until its lease ends, unless it is renewed.
        version: of its znode; each renewal raises it.
    """

    name: str
    subscription: str
    host: str
    process: str
    since_ms: int = 0
    left_ms: int = 0
    version: int = 0


def keep(session: ZooKeeperSession, group: str, member: Member, lease_ms: int = LEASE_MS) -> list[Member]:
    """Register a member, or renew its lease.

    Returns:
        The live members in the order of their registration. This member is one of them, with the version that this
        renewal made, unless others removed its znode at each of five attempts.
    """
    path = paths.group_member(group, member.name)
    fields = {"subscription": member.subscription, "host": member.host, "process": member.process}
    content = to_json(fields)
    for _ in range(_ATTEMPTS):
        try:
            renewed = session.set(path, content)
        except NoNode:
            try:
                session.create(path, content)
            except NodeExists:  # created by an earlier attempt whose answer was lost
                pass
            continue
        live = _live(session, group, renewed.mtime, lease_ms)
        if any(each.name == member.name for each in live):
            return [each._replace(version=renewed.version) if each.name == member.name else each for each in live]
    return _live(session, group, _now_ms(session), lease_ms)


def leave(session: ZooKeeperSession, group: str, name: str) -> None:
    """Remove a member at once. If it does not exist, or is renewed meanwhile, do nothing. The version is checked, so a
    delete that arrives late does not remove a member that has come back under that name."""
    path = paths.group_member(group, name)
    stat = session.exists(path)
    if stat is not None:
        _remove(session, path, stat.version)


def live_members(session: ZooKeeperSession, group: str, lease_ms: int = LEASE_MS) -> list[Member]:
    """A group's live members in the order of their registration."""
    return _live(session, group, _now_ms(session), lease_ms)


def _now_ms(session: ZooKeeperSession) -> int:
    return session.set(paths.CONSUMERS, b"").mtime


def _live(session: ZooKeeperSession, group: str, now_ms: int, lease_ms: int) -> list[Member]:
    try:
        names = session.children(paths.group_members(group))
    except NoNode:
        return []
    found: list[tuple[int, Member]] = []
    wanted = [paths.group_member(group, name) for name in names]
    for name, path, content in zip(names, wanted, session.get_many(wanted), strict=True):
        if content is None:
            continue
        data, stat = content
        if stat.mtime <= now_ms - lease_ms:
            _remove(session, path, stat.version)
            continue
        try:
            with fields_of(path, data or b"{}") as fields:
                subscription, host, process = (str(fields.get(each, "")) for each in _FIELDS)
        except UnreadableZnode as error:  # no member's; it goes when its lease ends
            log.warning("member_not_readable", group=group, member=name, reason=str(error))
            continue
        left_ms = stat.mtime + lease_ms - now_ms
        found.append((stat.czxid, Member(name, subscription, host, process, stat.ctime, left_ms, stat.version)))
    return [member for _, member in sorted(found)]


def _remove(session: ZooKeeperSession, path: str, version: int) -> None:
    try:
        session.delete(path, version)
    except (NoNode, BadVersion):  # another reader removed it, or it was renewed meanwhile
        pass
