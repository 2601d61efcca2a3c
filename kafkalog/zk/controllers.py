"""The election of the controller in ZooKeeper, and the fence of its writes.

A broker becomes the controller in one change that creates the ephemeral /controller and raises the version of
/controller_epoch. Each write of a controller checks that version, so that what an earlier one sends late is refused.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from kafkalog.zk import paths, registry
from kafkalog.zk.content import fields_of, to_json, unknown_of
from kafkalog.zk.session import (
    BadVersion,
    Check,
    Create,
    Delete,
    NodeExists,
    NoNode,
    Operation,
    Set,
    Watch,
    ZooKeeperSession,
)


@dataclass(frozen=True)
class ControllerRecord:
    """A term of a controller.

    Attributes:
        broker_epoch: of the broker's registration.
        epoch: of the controller; the version of /controller_epoch.
        is_own: it was elected by this session.
    """

    broker_id: int
    broker_epoch: int
    epoch: int
    is_own: bool = False

    @property
    def fence(self) -> Check:
        """The check that no other controller was elected since."""
        return Check(paths.CONTROLLER_EPOCH, self.epoch)


def read_controller(session: ZooKeeperSession, watch: Watch | None = None) -> ControllerRecord | None:
    """The controller; None if there is none. `watch` is called when that changes."""
    [found] = session.get_many([paths.CONTROLLER], watch)
    if found is None:
        return None
    content, stat = found
    with fields_of(paths.CONTROLLER, content) as fields:
        is_own = stat.ephemeralOwner == session.session_id
        return ControllerRecord(fields["broker_id"], fields["broker_epoch"], fields["epoch"], is_own)


def elect_controller(session: ZooKeeperSession, broker_id: int, broker_epoch: int) -> ControllerRecord | None:
    """Become the controller, if there is none. An earlier term of the same session is replaced by a new one.

    Returns:
        None: there is another one, another one was faster, or the broker has registered again.
    """
    [found] = session.get_many([paths.CONTROLLER_EPOCH])
    while found is None:
        with suppress(NodeExists):
            session.create(paths.CONTROLLER_EPOCH)
        [found] = session.get_many([paths.CONTROLLER_EPOCH])
    last, stat = found
    before = read_controller(session)
    if before is not None and not before.is_own:
        return None
    term = ControllerRecord(broker_id, broker_epoch, stat.version + 1, is_own=True)
    fields = {"broker_id": broker_id, "broker_epoch": broker_epoch, "epoch": term.epoch}
    content = to_json(fields)
    operations: list[Operation] = [
        registry.registration_check(broker_id, broker_epoch),
        Set(paths.CONTROLLER_EPOCH, to_json({**unknown_of(last, fields), **fields}), stat.version),
    ]
    if before is not None:
        operations.append(Delete(paths.CONTROLLER))
    operations.append(Create(paths.CONTROLLER, content, ephemeral=True))
    try:
        session.multi(operations)
    except (NodeExists, NoNode, BadVersion):
        return None
    return term


def resign(session: ZooKeeperSession) -> None:
    """End a term of this session, if it has one."""
    found = read_controller(session)
    if found is not None and found.is_own:
        with suppress(NoNode):
            session.delete(paths.CONTROLLER)
