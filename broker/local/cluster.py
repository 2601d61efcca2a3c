"""A whole cluster on this machine: ZooKeeper and brokers as processes, for tests, notebooks and `kafkalog local`.

    with LocalCluster(brokers=3) as cluster:
        producer = Producer(cluster.bootstrap_servers)

The processes belong to a guard (`guard.py`), which stops them when this process ends, however it ends. Without a data
directory, all data is in a temporary one, which a sweeper removes after the last process has ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from broker.config import BrokerSettings
from broker.local.guard import python_command
from broker.local.sweeper import swept_folder
from kafkalog.errors import Closed, InvalidArgument, LocalClusterEnded, from_wire

_CLOSE_SECONDS = 90.0
_REPLICATED = {"default.replication.factor": 3, "default.min.insync.replicas": 2}
_OWN_SETTINGS = ("broker.id", "log.dir", "zookeeper.connect", "grpc.port", "data.port", "host", "exit.with.stdin")


class LocalBroker:
    """One broker of a local cluster; stays the same through stops and starts, as do its ports.

    Attributes:
        pid: of its process; None while it does not run.
        log_file: the path of its log.
        data_directory: the path of its partitions.
    """

    def __init__(self, cluster: LocalCluster, index: int, host: str, announced: Mapping[str, Any]) -> None:
        self._cluster = cluster
        self._index = index
        self.host = host
        self.broker_id: int = announced["broker_id"]
        self.grpc_port: int = announced["grpc_port"]
        self.data_port: int = announced["data_port"]
        self.pid: int | None = announced["pid"]
        self.log_file = Path(announced["log_file"])
        self.data_directory = cluster.root / f"broker-{self.broker_id}"

    @property
    def address(self) -> str:
        """host:port of its gRPC service."""
        return f"{self.host}:{self.grpc_port}"

    def stop(self) -> int | None:
        """Stop it in order; returns its exit code, or None if it does not run."""
        code: int | None = self._cluster._ask({"do": "stop_broker", "broker": self._index})
        self.pid = None
        return code

    def kill(self) -> None:
        """End it as a crash does (SIGKILL)."""
        self._cluster._ask({"do": "kill_broker", "broker": self._index})
        self.pid = None

    def start(self) -> None:
        """Start it again at the same ports; returns once it serves. Raises the error if it cannot start."""
        self.pid = self._cluster._ask({"do": "start_broker", "broker": self._index})["pid"]


class LocalZooKeeper:
    """The cluster's ZooKeeper. `connect` is its host:port, `log_file` the path of its log."""

    def __init__(self, cluster: LocalCluster, connect: str, pid: int, log_file: Path) -> None:
        self._cluster = cluster
        self.connect = connect
        self.pid: int | None = pid
        self.log_file = log_file

    def kill(self) -> None:
        """End it as a crash does."""
        self._cluster._ask({"do": "kill_zookeeper"})
        self.pid = None

    def start(self) -> None:
        """Start it again at the same port; returns once it serves."""
        self.pid = self._cluster._ask({"do": "start_zookeeper"})["pid"]


class Health(NamedTuple):
    """Events of a cluster's processes since the last look.

    Attributes:
        ended: "broker 1" or "ZooKeeper" -> exit code, negative for a signal; of those that ended on their own.
        events: broker id and the logged event with its level (warning, error).
    """

    ended: dict[str, int]
    events: list[tuple[int, dict[str, Any]]]


class LocalCluster:
    """ZooKeeper and brokers on this machine, as a context manager or by `start` and `close`. Each is a process.

    Args:
        brokers: the number of brokers, at least 1.
        data: directory for all data, kept at the end; None: a temporary one, deleted with the cluster.
        port: broker i serves gRPC at port + 2i and data at port + 2i + 1; None: free ports.
        zookeeper_port: None: a free port.
        settings: of every broker, dotted or snake_case names (`broker/config.py`). With three brokers or more, a topic
            has three copies and min.insync.replicas=2, unless default.replication.factor or
            default.min.insync.replicas is given. A default.replication.factor above `brokers` is refused.
        host: address on which all servers listen; 0.0.0.0 and :: require the setting advertised.host.
        durable: whether ZooKeeper syncs each transaction before it answers; None: if `data` is given.
    """

    def __init__(
        self,
        brokers: int = 1,
        data: str | os.PathLike[str] | None = None,
        port: int | None = None,
        *,
        zookeeper_port: int | None = None,
        settings: Mapping[str, Any] | None = None,
        host: str = "127.0.0.1",
        durable: bool | None = None,
    ) -> None:
        if brokers < 1:
            raise InvalidArgument(reason=f"brokers must be at least 1, not {brokers}")
        given = dict(settings or {})
        for name in _OWN_SETTINGS:
            if name in given or name.replace(".", "_") in given:
                raise InvalidArgument(reason=f"setting {name} is chosen by the local cluster and cannot be given")
        parsed = BrokerSettings.parse((_REPLICATED if brokers >= 3 else {}) | given | {"host": host})
        last_port = (port or 0) + 2 * brokers - 1
        if port is not None and not 0 < port <= last_port < 65536:
            raise InvalidArgument(reason=f"ports {port} to {last_port} are not all from 1 to 65535")
        factor = parsed.default_replication_factor
        if factor > brokers:
            raise InvalidArgument(
                reason=f"default.replication.factor={factor} needs as many brokers, and brokers is {brokers}: give "
                f"brokers={factor} (kafkalog local --brokers {factor}), or at most {brokers} as "
                "default.replication.factor"
            )
        self.brokers: list[LocalBroker] = []
        self.zookeeper: LocalZooKeeper | None = None
        self._host = host
        self._count = brokers
        self._port = port
        self._zookeeper_port = zookeeper_port
        self._settings = parsed.given()
        self._advertised_host = parsed.advertised_host or host
        self._data = Path(data).absolute() if data is not None else None
        self._durable = self._data is not None if durable is None else durable
        self.root = self._data or Path()
        self._guard: subprocess.Popen[bytes] | None = None
        self._sweeper: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # guards the pipes to the guard: one command at a time

    def start(self) -> Self:
        """Start everything; returns once all brokers serve.

        Raises:
            AddressInUse, DataDirInUse, MissingDependency, ZooKeeperUnreachable: nothing is left running.
            InvalidArgument: the data directory has data of a broker that this cluster would not start.
        """
        self._check_all_brokers_start()
        keep_fd = None
        try:
            if self._data is None:
                self.root, self._sweeper, keep_fd = swept_folder("kafkalog-")
            keep_fds = [] if keep_fd is None else [keep_fd]
            self._guard = subprocess.Popen(
                python_command("broker.local.guard", str(os.getpid())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=keep_fds,
                start_new_session=True,
            )
            if keep_fd is not None:
                os.close(keep_fd)
                keep_fd = None
            plan = {
                "root": str(self.root),
                "host": self._host,
                "durable": self._durable,
                "keep_fds": keep_fds,
                "zookeeper_port": self._zookeeper_port,
                "brokers": [self._broker_settings(index) for index in range(self._count)],
            }
            started = self._ask(plan)
        except BaseException:
            if keep_fd is not None:
                os.close(keep_fd)
            self.close()
            raise
        log_file = Path(started["zookeeper_log"])
        self.zookeeper = LocalZooKeeper(self, started["zookeeper"], started["zookeeper_pid"], log_file)
        self.brokers = [
            LocalBroker(self, index, self._advertised_host, announced)
            for index, announced in enumerate(started["brokers"])
        ]
        return self

    def _check_all_brokers_start(self) -> None:
        """Refuse to start without a broker that the data directory has: calls for its partitions would hang."""
        if self._data is None or not self._data.is_dir():
            return
        numbers = [path.name.removeprefix("broker-") for path in self._data.glob("broker-*") if path.is_dir()]
        last = max((int(number) for number in numbers if number.isdecimal()), default=-1)
        if last >= self._count:
            raise InvalidArgument(
                reason=f"{self._data} has the data of broker {last}, whose partitions would not be served with "
                f"brokers={self._count}: give brokers={last + 1} (kafkalog local --brokers {last + 1})"
            )

    def _broker_settings(self, index: int) -> dict[str, Any]:
        port = 0 if self._port is None else self._port + 2 * index
        return self._settings | {
            "broker.id": index,
            "log.dir": str(self.root / f"broker-{index}"),
            "grpc.port": port,
            "data.port": port + 1 if port else 0,
        }

    def close(self) -> None:
        """Stop everything in order, and remove the temporary directory. Safe to call twice."""
        guard, self._guard = self._guard, None
        if guard is not None:
            assert guard.stdin is not None
            assert guard.stdout is not None
            try:
                guard.stdin.write(b'{"do": "close"}\n')
                guard.stdin.close()
            except OSError:  # it has ended already
                pass
            try:
                guard.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                guard.kill()
                guard.wait()
            guard.stdout.close()
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.wait()
        for broker in self.brokers:
            broker.pid = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def bootstrap_servers(self) -> str:
        """The addresses for clients: host:port,host:port of the gRPC ports."""
        return ",".join(broker.address for broker in self.brokers)

    @property
    def zookeeper_connect(self) -> str:
        """host:port of ZooKeeper; the cluster has the default chroot."""
        if self.zookeeper is None:
            raise Closed(what="cluster")
        return self.zookeeper.connect

    def look(self) -> Health:
        """The processes that ended on their own, and the warnings and errors that brokers logged."""
        looked = self._ask({"do": "look"})
        ended = {f"broker {each['broker_id']}": each["ended"] for each in looked["brokers"]}
        ended["ZooKeeper"] = looked["zookeeper_ended"]
        return Health(
            {name: code for name, code in ended.items() if code is not None},
            [(each["broker_id"], event) for each in looked["brokers"] for event in each["events"]],
        )

    @property
    def guard_pid(self) -> int | None:
        return self._guard.pid if self._guard else None

    def _ask(self, command: Mapping[str, Any]) -> Any:
        """Send the guard a command and return its result. Raises the guard's error."""
        guard = self._guard
        if guard is None:
            raise Closed(what="cluster")
        answered: Future[bytes] = Future()
        # In a thread, which Ctrl-C does not interrupt: an answer left in the pipe would be taken for the next
        # command's.
        threading.Thread(target=self._converse, args=(guard, command, answered), daemon=True).start()
        line = answered.result()
        if not line:
            raise LocalClusterEnded(root=str(self.root))
        answer = json.loads(line)
        if "error" in answer:
            raise from_wire(answer["error"], answer["facts"])
        return answer["result"]

    def _converse(self, guard: subprocess.Popen[bytes], command: Mapping[str, Any], answered: Future[bytes]) -> None:
        assert guard.stdin is not None
        assert guard.stdout is not None
        line = b""
        try:
            with self._lock:
                guard.stdin.write(json.dumps(command).encode() + b"\n")
                guard.stdin.flush()
                line = guard.stdout.readline()
        except (BrokenPipeError, ValueError):  # it has ended, or its pipes are closed
            pass
        finally:
            answered.set_result(line)
