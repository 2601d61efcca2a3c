"""What happens in ZooKeeper between two calls of a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kafkalog.zk.session import ZooKeeperSession


def amid(monkeypatch: pytest.MonkeyPatch, session: ZooKeeperSession, call: str, happens: Callable[[], object]) -> None:
    """Let something happen right after the session's next call of that name."""
    original = getattr(session, call)

    def called(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(session, call, original)
        result = original(*arguments, **named)
        happens()
        return result

    monkeypatch.setattr(session, call, called)
