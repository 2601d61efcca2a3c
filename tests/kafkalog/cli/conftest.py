"""A topic for the tests of commands."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from kafkalog import Admin

if TYPE_CHECKING:
    from broker.local import LocalCluster


@pytest.fixture
def topic(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A topic of two partitions, and KAFKALOG_BOOTSTRAP set so that commands find it."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", request.node.name)
    os.environ["KAFKALOG_BOOTSTRAP"] = cluster.bootstrap_servers
    with Admin(cluster.bootstrap_servers) as admin:
        admin.create_topic(name, partitions=2)
        yield name
        if name in [each.name for each in admin.topics()]:
            admin.delete_topic(name)
    del os.environ["KAFKALOG_BOOTSTRAP"]
