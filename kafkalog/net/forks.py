"""Handlers for forks. A forked child must not use its parent's connections, above all gRPC's: an object that holds some
registers here, and releases them in the child. Opens nothing."""

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
    """Have `let_go(owner)` called in every forked child, for as long as the owner lives. `let_go` must not refer to the
    owner: it is a function of the class."""
    _owners[owner] = let_go


def _in_child() -> None:
    for owner, let_go in list(_owners.items()):
        try:
            let_go(owner)
        except Exception:  # a defect; the other owners must still release their parent's connections
            log.exception("after_fork_failed", owner=type(owner).__name__)


os.register_at_fork(after_in_child=_in_child)
