"""Three brokers inside the test process, which can be killed and started again, and topics with a copy on each."""

from __future__ import annotations

from collections.abc import Iterable

from kafkalog.client.admin import Admin
from tests.broker.conftest import RunningBroker, StartBroker
from tests.waiting import waited_for


class Brokers:
    """Brokers 0 to 2.

    Attributes:
        running: those that run, by id.
    """

    def __init__(self, start: StartBroker) -> None:
        self._start = start
        self.running: dict[int, RunningBroker] = {}
        self._ports: dict[int, tuple[int, int]] = {}
        for broker_id in range(3):
            self.start(broker_id)
        self.bootstrap_servers = ",".join(f"127.0.0.1:{grpc_port}" for grpc_port, _ in self._ports.values())

    def start(self, broker_id: int) -> None:
        """Start a broker, again at the same ports."""
        grpc_port, data_port = self._ports.get(broker_id, (0, 0))
        started = self._start(broker_id, replica_lag_time_max_ms=3000, grpc_port=grpc_port, data_port=data_port)
        self.running[broker_id] = started
        self._ports[broker_id] = (started.broker.grpc_port, started.broker.data_port)

    def stop(self, broker_id: int) -> None:
        """Stop a broker in order: it hands its partitions over."""
        self.running.pop(broker_id).stop()

    def kill(self, broker_id: int) -> None:
        """End a broker as a crash does, as far as a process can that has others in it."""
        self.running.pop(broker_id).stop(clean=False)


def wait_in_sync(admin: Admin, topic: str, brokers: Iterable[int] = range(3)) -> None:
    """Wait until each partition has a leader, and these brokers are its in-sync set."""
    wanted = set(brokers)

    def are_in_sync() -> bool:
        [described] = admin.describe_topics([topic])
        return all(each.leader in wanted and set(each.isr) == wanted for each in described.partitions)

    waited_for(are_in_sync, 20, f"the replicas of {topic} are not in sync")
