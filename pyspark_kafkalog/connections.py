"""This process's connections to clusters, kept for its next task or micro-batch: Spark's Python processes live through
many. Nothing connects at import.

A new process waits for unreachable brokers as long as one that has run for long, because Spark starts its processes at
any time, and a query should not fail because its broker restarts meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafkalog.client.cluster import Cluster
    from kafkalog.client.config import ClientSettings

Key = tuple[int, str, tuple[tuple[str, Any], ...]]
"""By process id (a forked child must not use its parent's), servers and settings."""

_clusters: dict[Key, Cluster] = {}
_lock = threading.Lock()
"""Guards `_clusters`: queries that `write_stream` commits have a thread each."""


def key_of(bootstrap_servers: str, settings: Mapping[str, Any]) -> Key:
    """The key of this process for a cluster and settings, whatever their order."""
    return os.getpid(), bootstrap_servers, tuple(sorted(settings.items()))


def as_patient_at_first(given: Mapping[str, Any], retry_timeout_ms: int) -> dict[str, Any]:
    """Settings, by dotted name, with bootstrap.timeout.ms as long as retry.timeout.ms unless it is given."""
    return {"bootstrap.timeout.ms": retry_timeout_ms, **given}


def cluster_of(bootstrap_servers: str, settings: ClientSettings) -> Cluster:
    """The connections to a cluster. `settings`: a producer's or consumer's; only the connection settings count."""
    from kafkalog.client.config import ClientSettings, connection_settings

    settings = connection_settings(settings)
    settings = ClientSettings.parse(as_patient_at_first(settings.given(), settings.retry_timeout_ms))
    key = key_of(bootstrap_servers, settings.given())
    with _lock:
        cluster = _clusters.get(key)
        if cluster is None:
            from kafkalog.client.cluster import Cluster

            cluster = _clusters[key] = Cluster(bootstrap_servers, settings)
    return cluster
