"""The contents of znodes: JSON objects. Knows none of their fields.

A newer version may add fields to an object. A version that does not know them writes them again when it writes the
znode, so that brokers of two versions can share a cluster. Exceptions are a lease, which is written blindly at each
heartbeat, and znodes that end with the session of their writer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kafkalog.errors import UnreadableZnode

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def to_json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


@contextmanager
def fields_of(path: str, content: bytes) -> Iterator[dict[str, Any]]:
    """The fields of the znode at a path, to be taken out of the object during the `with` block.

    Raises:
        UnreadableZnode: the content is no JSON object, or in the block a field turned out to be missing or of another
            kind.
    """
    try:
        yield _parsed(content)
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise UnreadableZnode(path=path, reason=str(error)) from None
    except KeyError as error:
        raise UnreadableZnode(path=path, reason=f"it has no field {error}") from None


def unknown_in(fields: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields that this version does not know, to be kept when the znode is written again."""
    return {name: value for name, value in fields.items() if name not in known}


def unknown_of(content: bytes, known: Collection[str]) -> dict[str, Any]:
    """As `unknown_in`, of a znode that is about to be replaced whatever it holds: none if it cannot be read."""
    try:
        return unknown_in(_parsed(content), known)
    except ValueError:
        return {}


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def read_each(
    read: Callable[[Sequence[_Key]], Sequence[_Value]], wanted: Sequence[_Key]
) -> dict[_Key, _Value | UnreadableZnode]:
    """What `read` returns for each of many, or what it raises for this one alone: none that cannot be read hides
    another."""
    try:
        return dict(zip(wanted, read(wanted), strict=True))
    except UnreadableZnode as error:
        if len(wanted) == 1:
            return {wanted[0]: error}
    half = len(wanted) // 2
    return read_each(read, wanted[:half]) | read_each(read, wanted[half:])
