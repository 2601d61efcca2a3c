"""A cluster whose processes can be killed and suspended, and whose network can fail: ZooKeeper and brokers as
processes, each broker's way to ZooKeeper and to its own ports through a link (`network.py`).

Brokers listen on 127.0.0.1 and are registered as 127.0.1.1, 127.0.1.2 and so on, where the links listen on the same
ports. So clients and brokers find each other by the registry, and every connection passes a link.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from broker.local.guard import BrokerChild, Watch
from broker.local.zookeeper import EmbeddedZooKeeper
from broker.storage.checkpoint import Checkpoint, read_checkpoint
from broker.storage.disk import Disk
from broker.storage.log_dir import LOCK_NAME
from kafkalog.errors import KafkalogError
from tests.chaos.network import Link, owner_of
from tests.free_ports import free_ports
from tests.waiting import suspend

_LINKS = 2  # before a broker's two ports
SESSION_TIMEOUT_MS = 2000
"""The smallest that this ZooKeeper grants."""


class Unwatched(Watch):
    """Waits for input only: here the parent is the test, which stops what it started."""

    def __init__(self) -> None:
        pass

    def wait_readable(self, fd: int, seconds: float | None) -> bool:
        return bool(select.select([fd], [], [], seconds)[0])

    def pause(self, seconds: float) -> None:
        threading.Event().wait(seconds)


class Server:
    """One broker. Not thread-safe.

    Attributes:
        name: of its connections to links, "broker 1".
        pid: None while it does not run.
        is_suspended: it has SIGSTOP.
        to_zookeeper, links: its way there, and those to its ports.
    """

    def __init__(
        self, folder: Path, broker_id: int, port: int, zookeeper_port: int, settings: Mapping[str, Any]
    ) -> None:
        self.broker_id = broker_id
        self.name = f"broker {broker_id}"
        self.host = f"127.0.1.{broker_id + 1}"
        self.grpc_port = port
        self.pid: int | None = None
        self.is_suspended = False
        self.to_zookeeper = Link(zookeeper_port)
        self.links: list[Link] = []
        self._log_directory = folder / f"broker-{broker_id}"
        own = {
            "broker.id": broker_id,
            "log.dir": str(self._log_directory),
            "zookeeper.connect": f"127.0.0.1:{self.to_zookeeper.port}",
            "zookeeper.session.timeout.ms": SESSION_TIMEOUT_MS,
            "grpc.port": port,
            "data.port": port + 1,
            "advertised.host": self.host,
            "exit.with.stdin": True,
        }
        self._child = BrokerChild({**settings, **own}, folder, (), Unwatched())
        self._waker: subprocess.Popen[bytes] | None = None
        self.log_file = self._child.log_file

    @property
    def is_well(self) -> bool:
        """Whether the process runs; its network may fail all the same."""
        return self.pid is not None and not self.is_suspended

    def launch(self) -> None:
        """Begin to start it; `await_ready` returns when it serves."""
        self._child.launch()
        self._child.let_go()

    def await_ready(self) -> None:
        """Raises the error if it cannot start."""
        self.pid = self._child.await_ready()["pid"]
        self.is_suspended = False

    def start(self) -> None:
        self.launch()
        self.await_ready()

    def kill(self) -> None:
        """End it as a crash does."""
        self._child.kill()
        self.resume()
        self.pid = None

    def lose_power(self, keeps_logs: bool) -> None:
        """Kill it, and lose what a loss of power may lose: of each log half of what came after the recovery point, and
        the boot id.

        Args:
            keeps_logs: each append was synced before its ack.
        """
        self.kill()
        for folder in self._log_directory.iterdir():
            segments = sorted(folder.glob("*.log"))
            if segments and not keeps_logs:
                checkpoint = read_checkpoint(Disk(), folder) or Checkpoint()
                places = checkpoint.places_in(int(segments[-1].stem))
                synced = max((position for position, _ in places), default=0)
                size = segments[-1].stat().st_size
                os.truncate(segments[-1], min(size, max(synced, size // 2)))
        lock = self._log_directory / LOCK_NAME
        lines = lock.read_bytes().split(b"\n")
        lock.write_bytes(b"\n".join([lines[0], b"0" * len(lines[1]), *lines[2:]]))

    def lose_disk(self) -> None:
        """Kill it, and empty its data directory."""
        self.kill()
        shutil.rmtree(self._log_directory)
        self._log_directory.mkdir()

    def stop(self) -> None:
        """Stop it in order. Fails if it ends with an error."""
        self._child.begin_stop()
        code = self._child.finish_stop()
        assert code in (0, None), f"broker {self.broker_id} stopped with {code}"
        self.pid = None

    def suspend(self) -> None:
        assert self.pid is not None
        # If this process is killed, its pipe ends, and the broker goes on, only to find that its own input has ended.
        wake = ["sh", "-c", 'read -r _; kill -CONT "$0"', str(self.pid)]
        self._waker = subprocess.Popen(wake, stdin=subprocess.PIPE, start_new_session=True)
        suspend(self.pid)
        self.is_suspended = True

    def resume(self) -> None:
        if self._waker is not None:
            self._waker.communicate()
            self._waker = None
        self.is_suspended = False

    def ended(self) -> int | None:
        """The exit code, if it ended by itself."""
        code: int | None = self._child.look()["ended"]
        return code

    def close(self) -> None:
        self.kill()
        for link in (self.to_zookeeper, *self.links):
            link.close()


class Servers:
    """ZooKeeper and brokers; a context manager. Start it in a thread that stays: ZooKeeper dies with that.

    Args:
        settings: of every broker, dotted.
    """

    def __init__(self, folder: Path, brokers: int, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self._settings = dict(settings)
        self._count = brokers
        self.zookeeper = EmbeddedZooKeeper(folder / "zookeeper", durable=False)
        self.zookeeper_is_suspended = False
        self.brokers: list[Server] = []

    def __enter__(self) -> Self:
        try:
            self.start_zookeeper()
            assert self.zookeeper.port is not None
            port = free_ports(_LINKS * self._count)
            for number in range(self._count):
                at = port + _LINKS * number
                server = Server(self.folder, number, at, self.zookeeper.port, self._settings)
                self.brokers.append(server)
                server.links += [Link(each, (server.host, each), self.origin) for each in (at, at + 1)]
                server.launch()
            for server in self.brokers:
                server.await_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for server in self.brokers:
            server.close()
        self.resume_zookeeper()
        self.zookeeper.stop()

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"{server.host}:{server.grpc_port}" for server in self.brokers)

    def origin(self, port: int) -> str:
        """The name of the broker that connects from this port; "clients": none of them."""
        by_pid = {server.pid: server.name for server in self.brokers if server.pid is not None}
        owner = owner_of(port, by_pid)
        return "clients" if owner is None else by_pid[owner]

    def start_zookeeper(self) -> None:
        self.zookeeper.start()
        self.zookeeper.wait_ready(threading.Event().wait)

    def suspend_zookeeper(self) -> None:
        assert self.zookeeper.pid is not None
        suspend(self.zookeeper.pid)
        self.zookeeper_is_suspended = True

    def resume_zookeeper(self) -> None:
        if self.zookeeper_is_suspended and self.zookeeper.pid is not None:
            os.kill(self.zookeeper.pid, signal.SIGCONT)
        self.zookeeper_is_suspended = False

    def heal(self, without: Server | None = None) -> None:
        """Mend the network, and start and resume all that does not run, except one broker if it is named."""
        if self.zookeeper.pid is None:
            self.start_zookeeper()
        self.resume_zookeeper()
        wanted = [server for server in self.brokers if server is not without]
        for server in wanted:
            for link in (server.to_zookeeper, *server.links):
                link.clear()
            server.resume()
        for server in wanted:
            if server.pid is None:
                self._start(server)

    def _start(self, server: Server) -> None:
        """Start it; once more if ZooKeeper, which has just come back, did not answer it in time."""
        try:
            server.start()
        except KafkalogError as error:
            if not error.retriable:
                raise
            server.start()

    def check(self) -> None:
        """Fail if a process ended by itself."""
        for server in self.brokers:
            if server.is_well and (code := server.ended()) is not None:
                raise AssertionError(f"{server.name} ended with {code}: {_end_of(server.log_file)}")
        assert self.zookeeper.ended() is None, f"ZooKeeper ended by itself: {_end_of(self.zookeeper.log_file)}"


def _end_of(path: Path) -> str:
    return path.read_text(errors="replace")[-3000:]
