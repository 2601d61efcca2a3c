"""What a fork does to a client. gRPC and forks do not mix: who holds what a child must not use registers here, and lets
go of it in the child. Opens nothing."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from kafkalog.events import get_logger

log = get_logger(__name__)

_Owner = TypeVar("_Owner")

_owners: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def after_fork(owner: _Owner, let_go: Callable[[_Owner], None]) -> None:
    """Have `let_go(owner)` called in every forked child, for as long as the owner lives. `let_go` holds no owner: it is
    a function of the class."""
    _owners[owner] = let_go


def _in_child() -> None:
    for owner, let_go in list(_owners.items()):
        try:
            let_go(owner)
        except Exception:  # a defect; the others must not go on with what is their parent's for it
            log.exception("after_fork_failed", owner=type(owner).__name__)


os.register_at_fork(after_in_child=_in_child)
