"""A cluster's processes are killed, suspended and cut off, and serve again when they are healed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafkalog import Admin
from kafkalog.errors import BrokerUnreachable
from tests.chaos.network import Weather
from tests.chaos.servers import Servers
from tests.waiting import waited_for

pytestmark = pytest.mark.java


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("servers"), 2, {}) as running:
        yield running
        running.check()


def live(servers: Servers) -> set[int]:
    """The brokers that are registered, by one that is well; none if it does not answer."""
    with Admin(servers.bootstrap_servers, retry_timeout_ms=0) as admin:
        try:
            return {broker.broker_id for broker in admin.describe_cluster().brokers}
        except BrokerUnreachable:
            return set()


def test_a_connection_is_known_by_the_broker_that_made_it(servers: Servers) -> None:
    for server in servers.brokers:
        made = {connection.client for connection in server.to_zookeeper._connections.values()}
        assert {servers.origin(client.getpeername()[1]) for client in made} == {server.name}
    with Admin(servers.bootstrap_servers) as admin:
        admin.describe_cluster()
        clients = {
            each.origin for server in servers.brokers for link in server.links for each in link._connections.values()
        }
    assert clients == {"clients"}


def test_a_broker_that_is_suspended_and_killed_serves_again(servers: Servers) -> None:
    first, second = servers.brokers
    first.suspend()
    second.kill()
    assert not first.is_well and not second.is_well
    servers.heal()
    assert first.is_well and second.is_well
    waited_for(lambda: live(servers) == {0, 1})


def test_a_broker_that_is_spared_stays_down(servers: Servers) -> None:
    first, second = servers.brokers
    second.kill()
    servers.zookeeper.kill()
    servers.heal(without=second)
    assert first.is_well and not second.is_well
    servers.heal()
    waited_for(lambda: live(servers) == {0, 1})


def test_a_broker_that_is_cut_from_zookeeper_is_not_registered_until_it_is_healed(servers: Servers) -> None:
    second = servers.brokers[1]
    second.to_zookeeper.set(Weather(is_cut=True))
    for link in second.links:
        link.set(Weather(is_cut=True))  # for clients: `live` is to ask the first
    waited_for(lambda: live(servers) == {0})
    servers.heal()
    waited_for(lambda: live(servers) == {0, 1})


_SUSPENDED = """
import sys
from pathlib import Path
from tests.chaos.servers import Servers

with Servers(Path(sys.argv[1]), 1, {}) as servers:
    pid = servers.brokers[0].pid
    servers.brokers[0].suspend()
    print(pid, flush=True)
    sys.stdin.read()
"""


def test_a_suspended_broker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SUSPENDED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    waited_for(lambda: not os.path.exists(f"/proc/{pid}"))
