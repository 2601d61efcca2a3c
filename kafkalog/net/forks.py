"""What a fork does to a client. gRPC and forks do not mix: who holds what a child must not use registers here, and lets
go of it in the child. Opens nothing."""

from __future__ import annotations

import os
import weakref
from typing import Any

from kafkalog.events import get_logger

log = get_logger(__name__)

_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def after_fork(owner: Any) -> None:
    """Have `owner.after_fork_in_child()` called in every forked child, for as long as the owner lives."""
    _owners.add(owner)


def _in_child() -> None:
    for owner in list(_owners):
        try:
            owner.after_fork_in_child()
        except Exception:  # a defect; the others must not go on with what is their parent's for it
            log.exception("after_fork_failed", owner=type(owner).__name__)


os.register_at_fork(after_in_child=_in_child)
