"""The cluster's id and its format level: one znode, /cluster, which the first broker creates.

A registration checks the level in the change that makes it, and the change that raises the level checks that nobody has
registered since it was compared with the registrations (`raise_format_level`). So a registered broker understands the
cluster's level.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kafkalog.errors import FormatLevelNotRaised, FormatLevelNotUnderstood
from kafkalog.events import get_logger
from kafkalog.versions import FIRST, FORMATS, VersionRange
from kafkalog.zk import paths
from kafkalog.zk.content import fields_of, to_json, unknown_in
from kafkalog.zk.session import BadVersion, Check, NodeExists, Set, Watch, ZooKeeperSession

log = get_logger(__name__)

_FIELDS = frozenset({"cluster_id", "created_us", "format_level"})


@dataclass(frozen=True)
class ClusterRecord:
    """The cluster.

    Attributes:
        format_level: in no format of a higher level is anything written.
        version: of its znode.
        unknown: the fields of the znode that this version does not know.
    """

    cluster_id: str
    created_us: int
    format_level: int
    version: int = 0
    unknown: Mapping[str, Any] = field(default_factory=dict)

    @property
    def check(self) -> Check:
        """The check that the level was not raised since."""
        return Check(paths.CLUSTER, self.version)

    def check_not_lowered(self, level: int) -> None:
        """Raises FormatLevelNotRaised: a level is lower than the cluster's."""
        if level < self.format_level:
            reason = f"it cannot be lowered to {level}, because data of level {self.format_level} may have been written"
            raise FormatLevelNotRaised(level=self.format_level, reason=reason)

    def check_understood(self, broker_id: int, formats: VersionRange) -> None:
        """Raises FormatLevelNotUnderstood: a broker cannot read what the others may have written."""
        if not formats.includes(self.format_level):
            raise FormatLevelNotUnderstood(level=self.format_level, broker_id=broker_id, understood=str(formats))


def join_cluster(session: ZooKeeperSession, now_us: int, formats: VersionRange = FORMATS) -> ClusterRecord:
    """The cluster. The first broker creates it, with the newest format level that it understands. Also creates the
    permanent parents where they are missing."""
    session.ensure(paths.PERMANENT)
    fields = {"cluster_id": uuid.uuid4().hex, "created_us": now_us, "format_level": formats.newest}
    with suppress(NodeExists):
        session.create(paths.CLUSTER, to_json(fields))
        log.info("cluster_created", cluster_id=fields["cluster_id"])  # a mistyped chroot makes a second one
    found = read_cluster(session)
    assert found is not None, "it was created, and is never deleted"
    return found


def read_cluster(session: ZooKeeperSession, watch: Watch | None = None) -> ClusterRecord | None:
    """The cluster; None if no broker has created it yet, or its znode was removed by hand. `watch` is called when it
    changes."""
    [found] = session.get_many([paths.CLUSTER], watch)
    if found is None:
        return None
    content, stat = found
    with fields_of(paths.CLUSTER, content) as fields:
        level = int(fields.get("format_level", FIRST))
        return ClusterRecord(
            str(fields["cluster_id"]), int(fields["created_us"]), level, stat.version, unknown_in(fields, _FIELDS)
        )


def raise_format_level(
    session: ZooKeeperSession,
    before: ClusterRecord,
    level: int,
    formats: Mapping[int, VersionRange],
    registrations: int,
) -> bool:
    """Raise the cluster's format level.

    Args:
        before: the cluster as it was read.
        formats: the levels that each registered broker understands.
        registrations: the version of /brokers/epochs from before the registrations were read; each one raises it.

    Returns:
        False, and nothing was written, if the level was raised, or a broker registered, since.

    Raises:
        FormatLevelNotRaised: it would be lowered, or a registered broker does not understand it.
    """
    before.check_not_lowered(level)
    behind = {broker: each for broker, each in formats.items() if not each.includes(level)}
    if behind:
        listed = ", ".join(f"broker {broker} understands {each}" for broker, each in sorted(behind.items()))
        reason = f"{listed}; upgrade {'it' if len(behind) == 1 else 'them'} before you raise the level to {level}"
        raise FormatLevelNotRaised(level=before.format_level, reason=reason)
    content = to_json(
        {
            **before.unknown,
            "cluster_id": before.cluster_id,
            "created_us": before.created_us,
            "format_level": level,
        }
    )
    try:
        session.multi([Check(paths.BROKER_EPOCHS, registrations), Set(paths.CLUSTER, content, before.version)])
        return True
    except BadVersion:
        return False
