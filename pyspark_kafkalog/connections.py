"""This process's connections to clusters, kept for its next task or micro-batch: Spark's Python processes live through
many. Nothing connects at import."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafkalog.client.cluster import Cluster
    from kafkalog.config import Values

_clusters: dict[tuple[int, str, tuple[tuple[str, Any], ...]], Cluster] = {}
"""By process id (a forked child must not use its parent's), servers and settings."""


def cluster_of(bootstrap_servers: str, settings: Values) -> Cluster:
    """The connections to a cluster. `settings`: a producer's or consumer's, of which those about connections count."""
    from kafkalog.client.config import connection_settings

    settings = connection_settings(settings)
    key = (os.getpid(), bootstrap_servers, tuple(sorted(settings.given().items())))
    cluster = _clusters.get(key)
    if cluster is None:
        from kafkalog.client.cluster import Cluster

        cluster = _clusters[key] = Cluster(bootstrap_servers, settings)
    return cluster
