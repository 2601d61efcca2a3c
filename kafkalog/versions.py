"""The versions that this code speaks and understands: of the protocol between processes, and of what is stored.

Two peers speak the highest protocol version that both know; each names its range first (`wire/frames.py` on the data
port, the first answer of the gRPC service). What is stored has format levels. A cluster has one, in ZooKeeper
(`zk/cluster.py`), and nothing is written in a format of a higher one, so that every broker of the cluster can read all
of it. An operator raises it after every broker has been upgraded. It is never lowered.

A new format of anything that another broker reads gets the next level, and a row in `FORMAT_LEVELS`. A field that is
added to a JSON object or a protobuf message needs none: other versions keep or ignore it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class VersionRange(NamedTuple):
    """The versions from `oldest` to `newest`, both included."""

    oldest: int
    newest: int

    def includes(self, version: int) -> bool:
        return self.oldest <= version <= self.newest

    def highest_common(self, other: VersionRange) -> int | None:
        """The highest version that is in both; None if there is none."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None

    def __str__(self) -> str:
        return f"{self.oldest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


FIRST = 1
"""The version of a peer, and the level of a cluster, that names none."""

PROTOCOL = VersionRange(1, 1)
"""The protocol versions that this code speaks, on both ports."""

FORMATS = VersionRange(1, 1)
"""The format levels that this code reads and writes."""

FORMAT_LEVELS: Mapping[int, Mapping[str, int]] = MappingProxyType(
    {1: MappingProxyType({"record batch": 1, "index": 1, "producers": 2, "staged data": 1})}
)
"""By level, the version of each format that is written. The formats are those of docs/reference/formats.md."""
