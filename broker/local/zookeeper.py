"""An embedded ZooKeeper: the real server, from the jars inside pyspark, as a child process. Knows no broker.

The child dies with the thread that started it (Linux's PR_SET_PDEATHSIG), so start it from a thread that stays.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from broker.folder_lock import lock_folder
from broker.ports import check_port_free, free_port
from kafkalog.clock import SYSTEM_CLOCK, Clock
from kafkalog.errors import MissingDependency, ZooKeeperUnreachable
from kafkalog.events import get_logger

log = get_logger(__name__)

_MAIN = "org.apache.zookeeper.server.ZooKeeperServerMain"
_JARS = (
    "zookeeper-3*.jar",
    "zookeeper-jute-*.jar",
    "slf4j-api-*.jar",
    "metrics-core-*.jar",
    "snappy-java-*.jar",
    "netty-buffer-4*.jar",
    "netty-codec-base-*.jar",
    "netty-common-4*.jar",
    "netty-handler-4*.jar",
    "netty-resolver-4*.jar",
    "netty-transport-4*.jar",
    "netty-transport-classes-epoll-*.jar",
    "log4j-api-*.jar",
    "log4j-core-*.jar",
    "log4j-slf4j2-impl-*.jar",
)
_JAVA_OPTIONS = (
    "-Xmx256m",
    "-XX:+ExitOnOutOfMemoryError",
    "-Xss512k",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
)
"""A small heap and the quick compiler: 130 MB become 90, and it serves after 1.2 s on 2 cores. Each decision's znode
takes about 0.9 kB of heap; 256 MB hold 200,000. A server that lacks memory ends, rather than go on with some of its
threads dead."""
_PORT = "ZooKeeper's port"
_START_TIMEOUT = 30.0
_STOP_TIMEOUT = 10.0
_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):  # else it ended before
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and what it becomes would too
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def find_java() -> str:
    """Path of a java command, from JAVA_HOME or PATH. Raises MissingDependency."""
    home = os.environ.get("JAVA_HOME")
    if home:
        candidate = Path(home) / "bin" / "java"
        if os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which("java")
    if found:
        return found
    looked = f"{home}/bin and PATH" if home else "PATH, and JAVA_HOME is not set"
    raise MissingDependency(what="java (17 or later)", reason=f"looked in {looked}; Spark and ZooKeeper need it")


def find_jars() -> list[str]:
    """The jars that ZooKeeper needs, from inside pyspark. Raises MissingDependency."""
    spec = importlib.util.find_spec("pyspark")  # without the cost of an import
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependency(what="pyspark", reason="the embedded ZooKeeper comes from its jars; install pyspark")
    folder = Path(spec.submodule_search_locations[0]) / "jars"
    found = []
    for pattern in _JARS:
        matches = sorted(folder.glob(pattern))
        if not matches:
            raise MissingDependency(what=pattern, reason=f"it is not in {folder}; pyspark 4 has it")
        found += [str(match) for match in matches]
    return found


def with_parent(command: Sequence[str]) -> list[str]:
    """A command that becomes another one (a path and its arguments) and is killed when the thread that starts it ends.

    It needs no `preexec_fn`, which makes `subprocess` fork as gRPC's fork handlers see it. With a call under way they
    end some of the children before they run anything.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _WITH_PARENT, str(os.getpid()), *command]


def terminate(process: subprocess.Popen[bytes], timeout: float) -> None:
    """End a process and wait for it; kill it if it has not ended after so many seconds."""
    process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class EmbeddedZooKeeper:
    """One ZooKeeper server over a data directory.

    Args:
        directory: its data, configuration and log; made if missing.
        port: None takes a free one.
        host: address it is bound to.
        durable: False omits the fsync of every transaction, for a temporary cluster.
        pass_fds: file descriptors that the child inherits.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        durable: bool = True,
        pass_fds: Sequence[int] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.directory = directory.absolute()
        self.host = host
        self.port = port
        self._durable = durable
        self._pass_fds = tuple(pass_fds)
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None

    @property
    def connect(self) -> str:
        """host:port for clients."""
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def log_file(self) -> Path:
        return self.directory / "zookeeper.log"

    def start(self) -> None:
        """Start the server; `wait_ready` returns when it serves.

        Raises:
            MissingDependency: no java, no jars.
            AddressInUse: the given port is taken.
            DataDirInUse: another ZooKeeper has the directory.
            InvalidSetting: the host is none of this machine's.
        """
        java, jars = find_java(), find_jars()
        if self.port is None:
            self.port = free_port(self.host, _PORT)
        check_port_free(self.host, self.port, _PORT)
        if self._lock is None:
            self._lock = lock_folder(self.directory, "zookeeper.lock")
        (self.directory / "data").mkdir(parents=True, exist_ok=True)
        config = self.directory / "zookeeper.cfg"
        config.write_text(
            "maxSessionTimeout=2147483647\n"  # by default 20 ticks, whatever a broker's settings ask for
            f"tickTime=1000\ndataDir={self.directory / 'data'}\nclientPort={self.port}\n"
            f"clientPortAddress={self.host}\nadmin.enableServer=false\nmaxClientCnxns=0\n"
            "4lw.commands.whitelist=srvr\nautopurge.snapRetainCount=3\nautopurge.purgeInterval=1\n"
        )
        options = [*_JAVA_OPTIONS]
        if not self._durable:
            options.append("-Dzookeeper.forceSync=no")
        command = [java, *options, "-cp", ":".join(jars), _MAIN, str(config)]
        with self.log_file.open("ab") as output:
            self._process = subprocess.Popen(
                with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                pass_fds=self._pass_fds,
                start_new_session=True,  # a Ctrl-C at the terminal is for us to handle, in order
            )
        log.info("zookeeper_started", address=self.connect, pid=self._process.pid, directory=str(self.directory))

    def wait_ready(self, wait: Callable[[float], object], timeout: float = _START_TIMEOUT) -> None:
        """Return once it serves.

        Args:
            wait: how to pass a few hundredths of a second, such as `threading.Event().wait`.

        Raises:
            ZooKeeperUnreachable: it ended, or does not serve in time; the sentence has the last line of its log.
        """
        assert self._process is not None
        deadline = self._clock.monotonic() + timeout
        while not self.serves():
            if self._process.poll() is not None:
                raise self.unreachable(f"the server ended with code {self._process.returncode}")
            if self._clock.monotonic() > deadline:
                raise self.unreachable(f"it does not serve within {timeout:g} s")
            wait(0.05)

    def serves(self) -> bool:
        """Whether it accepts requests now.

        The command is `srvr`: ZooKeeper answers `ruok` a little earlier, and a client that connects then gets no answer
        until its own timeout of 10 s.
        """
        assert self.port is not None
        try:
            with socket.create_connection((self.host, self.port), timeout=1.0) as probe:
                probe.sendall(b"srvr")
                answer = b""
                while data := probe.recv(4096):
                    answer += data
                return b"Mode:" in answer
        except OSError:
            return False

    def ended(self) -> int | None:
        """The server's exit code (negative: a signal) if it ended by itself; None while it runs, or was stopped."""
        return None if self._process is None else self._process.poll()

    def unreachable(self, reason: str) -> ZooKeeperUnreachable:
        """The error for a caller that needs this server, with its last log line, because the log may be temporary."""
        logged = self.log_file.read_text(errors="replace").splitlines() if self.log_file.exists() else []
        lines = [line for line in logged if line.strip() and not line[0].isspace()]  # without stack frames
        said = f"ends: {lines[-1]}" if lines else "is empty"
        return ZooKeeperUnreachable(address=self.connect, reason=f"{reason}; its log {self.log_file} {said}")

    def stop(self) -> None:
        """End the server and wait for it. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            self._unlock()
            return
        terminate(process, _STOP_TIMEOUT)
        self._unlock()
        log.info("zookeeper_stopped", address=self.connect)

    def kill(self) -> None:
        """End the server as a crash does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
