"""What happens between two calls of something: in ZooKeeper those of a session, in a consumer those of its cursors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def amid(monkeypatch: pytest.MonkeyPatch, called: Any, name: str, happens: Callable[[], object]) -> None:
    """Let something happen right after the next call of that name."""
    original = getattr(called, name)

    def call(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(called, name, original)
        result = original(*arguments, **named)
        happens()
        return result

    monkeypatch.setattr(called, name, call)


def ahead(monkeypatch: pytest.MonkeyPatch, called: Any, name: str, happens: Callable[[], object]) -> None:
    """Let something happen right before the next call of that name."""
    original = getattr(called, name)

    def call(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(called, name, original)
        happens()
        return original(*arguments, **named)

    monkeypatch.setattr(called, name, call)
