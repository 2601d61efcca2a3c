"""A whole cluster on one machine: ZooKeeper, brokers, and the guard that ends them with the process that started them.

    from broker.local import LocalCluster

`LocalCluster` is imported on first access, because the processes of a cluster import from this package too.
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
