"""A whole cluster on one machine: ZooKeeper, brokers, and what ends them with whoever started them.

    from broker.local import LocalCluster

It is loaded when it is asked for: the processes that make up a cluster import from here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.local.cluster import LocalCluster

__all__ = ["LocalCluster"]


def __getattr__(name: str) -> Any:
    if name != "LocalCluster":
        raise AttributeError(f"module 'broker.local' has no attribute '{name}'")
    from broker.local.cluster import LocalCluster

    return LocalCluster
