"""The guard of a local cluster: the process that owns its ZooKeeper and brokers, and stops them when its parent goes.

It lives in a session of its own, so that a Ctrl-C at the terminal reaches the parent only. Commands come as lines of
JSON on standard input, each answered by a line on standard output. It ends, stopping everything in order, on a command,
at the end of its input, when its parent dies (detected by a pidfd, also when a forked child still holds the pipe), or
on SIGTERM.

If the guard itself is killed, the brokers see the end of their input and stop in order, and ZooKeeper dies with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from broker.config import BrokerSettings
from broker.folder_lock import lock_folder
from broker.local.zookeeper import EmbeddedZooKeeper
from kafkalog.clock import SYSTEM_CLOCK
from kafkalog.errors import (
    BrokerUnreachable,
    InternalError,
    InvalidArgument,
    InvalidRequest,
    KafkalogError,
    ZooKeeperUnreachable,
    from_wire,
)

_START_SECONDS = 60.0
_STOP_SECONDS = 40.0


def python_command(module: str, *arguments: str) -> list[str]:
    """A command that runs a module's `main` with this interpreter and exactly this process's import path."""
    paths = json.dumps([path or os.getcwd() for path in sys.path])
    code = f"import sys, json; sys.path[:] = json.loads(sys.argv.pop(1)); from {module} import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", code, paths, *arguments]


class ParentGone(Exception):
    """The guard's parent has ended, or wants the guard to end."""


class Watch:
    """Detects the reasons to end besides a command: the parent's death, SIGTERM."""

    def __init__(self, parent: int) -> None:
        self._poller = select.poll()
        reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._writing)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._ending = {reading}
        self._poller.register(reading, select.POLLIN)
        if hasattr(os, "pidfd_open"):
            try:
                pidfd = os.pidfd_open(parent)
            except ProcessLookupError:
                raise ParentGone() from None
            except OSError:  # a kernel or sandbox without pidfd: the end of the input has to suffice
                pass
            else:
                self._ending.add(pidfd)
                self._poller.register(pidfd, select.POLLIN)
        if os.getppid() != parent:
            raise ParentGone()

    def wait_readable(self, fd: int, seconds: float | None) -> bool:
        """Wait for input; returns False if none came in time. Raises ParentGone."""
        self._poller.register(fd, select.POLLIN)
        try:
            ready = {number for number, _ in self._poller.poll(None if seconds is None else seconds * 1000)}
        finally:
            self._poller.unregister(fd)
        if ready & self._ending:
            raise ParentGone()
        return fd in ready

    def pause(self, seconds: float) -> None:
        """Pass some time. Raises ParentGone."""
        if self._poller.poll(seconds * 1000):
            raise ParentGone()


class LineReader:
    """Reads lines of a descriptor; waits at the same time for the reasons to end."""

    def __init__(self, fd: int, watch: Watch) -> None:
        self._fd = fd
        self._watch = watch
        self._buffer = b""

    def next_line(self, seconds: float | None = None) -> str | None:
        """The next line; '' at the end of input, None when it does not come in time."""
        deadline = None if seconds is None else SYSTEM_CLOCK.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = None if deadline is None else max(0.0, deadline - SYSTEM_CLOCK.monotonic())
            if not self._watch.wait_readable(self._fd, left):
                return None
            data = os.read(self._fd, 65536)
            if not data:
                return ""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()


class BrokerChild:
    """One broker process and its configuration.

    Args:
        settings: dotted; a port of 0 becomes a free port at the first start, and stays the same afterwards.
        folder: of its configuration and log.
    """

    def __init__(self, settings: dict[str, Any], folder: Path, keep_fds: Sequence[int], watch: Watch) -> None:
        self._settings = settings
        self._keep_fds = tuple(keep_fds)
        self._watch = watch
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: LineReader | None = None  # the process's announcements
        self._events: list[dict[str, Any]] = []
        self.broker_id: int = settings["broker.id"]
        self._config = folder / f"broker-{self.broker_id}.properties"
        self.log_file = folder / f"broker-{self.broker_id}.log"

    def launch(self) -> None:
        """Start the process; it does its imports and then waits for `let_go`."""
        if self._process is not None and self._process.poll() is None:
            raise InvalidRequest(reason=f"broker {self.broker_id} is already running")
        self._release()
        lines = [f"{name}={BrokerSettings.rows[name].to_text(value)}" for name, value in self._settings.items()]
        self._config.write_text("\n".join(lines) + "\n")
        command = python_command("broker.__main__", "--hold", "--announce", "--config", str(self._config))
        with self.log_file.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,  # a buffer that `let_go` could not write would be written again, and fail, at the close
                pass_fds=self._keep_fds,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._lines = LineReader(self._process.stdout.fileno(), self._watch)

    def let_go(self) -> None:
        """Let the process start the broker; `await_ready` waits until it serves."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
        except BrokenPipeError:  # it has ended; await_ready raises why
            pass

    def await_ready(self) -> dict[str, Any]:
        """Wait until it serves; returns its ports and pid. Raises the error if it cannot start."""
        process = self._process
        assert process is not None
        line = self._next_announced(_START_SECONDS)
        if not line:
            self.kill()
            lines = self.log_file.read_text(errors="replace").strip().splitlines()
            said = lines[-1] if lines else "nothing"
            how = "did not serve in time" if line is None else f"ended with code {process.returncode}"
            raise BrokerUnreachable(address=f"broker {self.broker_id}", reason=f"it {how}; its log ends: {said}")
        announced = json.loads(line)
        if "error" in announced:
            self.kill()
            raise from_wire(announced["error"], announced["facts"])
        self._settings |= {"grpc.port": announced["grpc_port"], "data.port": announced["data_port"]}
        return {**announced, "broker_id": self.broker_id, "log_file": str(self.log_file)}

    def _next_announced(self, seconds: float) -> str | None:
        """The next line that is not an event, as `LineReader.next_line`; events are kept."""
        assert self._lines is not None
        while line := self._lines.next_line(seconds):
            if "event" not in (said := json.loads(line)):
                break
            self._events.append(said)
        return line

    def look(self) -> dict[str, Any]:
        """Its exit code, if it ended on its own (`ended`; negative for a signal), and the warnings and errors that it
        logged since the last look."""
        ended = None if self._process is None else self._process.poll()
        if self._lines is not None:
            self._next_announced(0.0)
        events, self._events = self._events, []
        return {"broker_id": self.broker_id, "ended": ended, "events": events}

    def begin_stop(self) -> None:
        """Ask it to stop in order; `finish_stop` waits for it. A suspended one is woken for that: it would not see the
        request, and all would wait until it is killed."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.send_signal(signal.SIGCONT)

    def finish_stop(self) -> int | None:
        """Wait until it has stopped; returns its exit code."""
        if self._process is None:
            return None
        try:
            return self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._release()

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._release()

    def _release(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._lines = None
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


class Guard:
    """Executes the parent's commands, and stops everything in reverse order at the end.

    Args:
        plan: {root, host, durable, keep_fds, zookeeper_port, brokers: [settings]}.
    """

    def __init__(self, plan: dict[str, Any], watch: Watch) -> None:
        self._watch = watch
        self._root = Path(plan["root"])
        self._keep_fds = plan["keep_fds"]
        self._lock = lock_folder(self._root, "cluster.lock")
        self._zookeeper = EmbeddedZooKeeper(
            self._root / "zookeeper",
            port=plan["zookeeper_port"],
            host=plan["host"],
            durable=plan["durable"],
            pass_fds=self._keep_fds,
        )
        self._planned = plan["brokers"]
        self._brokers: list[BrokerChild] = []

    def do(self, command: dict[str, Any]) -> Any:
        """Execute a command; returns its result as JSON-able values. Raises KafkalogError."""
        what, index = command["do"], command.get("broker", -1)
        if what == "start":
            return self._start()
        if what == "start_broker":
            self._brokers[index].launch()
            self._brokers[index].let_go()
            return self._await_ready(self._brokers[index])
        if what == "stop_broker":
            self._brokers[index].begin_stop()
            return self._brokers[index].finish_stop()
        if what == "kill_broker":
            return self._brokers[index].kill()
        if what == "look":
            return {
                "brokers": [child.look() for child in self._brokers],
                "zookeeper_ended": self._zookeeper.ended(),
            }
        if what == "start_zookeeper":
            self._zookeeper.start()
            self._zookeeper.wait_ready(self._watch.pause)
            return {"connect": self._zookeeper.connect, "pid": self._zookeeper.pid}
        if what == "kill_zookeeper":
            return self._zookeeper.kill()
        raise InternalError(reason=f"unknown command '{what}' of the guard")

    def _start(self) -> dict[str, Any]:
        """Start ZooKeeper and, at the same time, the brokers' imports, which take as long; then start the brokers."""
        self._zookeeper.start()
        for settings in self._planned:
            settings = settings | {"zookeeper.connect": self._zookeeper.connect, "exit.with.stdin": True}
            self._brokers.append(BrokerChild(settings, self._root, self._keep_fds, self._watch))
        for child in self._brokers:
            child.launch()
        self._zookeeper.wait_ready(self._watch.pause)
        for child in self._brokers:
            child.let_go()
        brokers = [self._await_ready(child) for child in self._brokers]
        return {
            "zookeeper": self._zookeeper.connect,
            "zookeeper_pid": self._zookeeper.pid,
            "zookeeper_log": str(self._zookeeper.log_file),
            "brokers": brokers,
        }

    def _await_ready(self, child: BrokerChild) -> dict[str, Any]:
        try:
            return child.await_ready()
        except ZooKeeperUnreachable as error:  # a ZooKeeper with a full disk may accept connections and not serve
            raise self._zookeeper.unreachable(error.facts["reason"]) from None

    def close(self) -> None:
        """Stop the brokers, then ZooKeeper."""
        for child in self._brokers:
            child.begin_stop()
        for child in self._brokers:
            child.finish_stop()
        self._zookeeper.stop()
        self._lock.close()


def _failed(error: KafkalogError) -> dict[str, Any]:
    code, facts = error.to_wire()
    return {"error": code, "facts": facts}


def main() -> int:
    """Serve the parent, whose pid is the first argument."""
    guard = None
    try:
        watch = Watch(int(sys.argv[1]))
        lines = LineReader(sys.stdin.fileno(), watch)
        while line := lines.next_line():
            command = json.loads(line)
            try:
                if guard is None:
                    guard = Guard(command, watch)
                    command = {"do": "start"}
                elif command["do"] == "close":
                    break
                answer = {"result": guard.do(command)}
            except KafkalogError as error:
                answer = _failed(error)
            except OSError as error:  # of the folder: read-only, full, a file in its way
                where = error.filename or command.get("root")
                answer = _failed(InvalidArgument(reason=f"{where}: {error.strerror}"))
            print(json.dumps(answer), flush=True)
            if guard is None:
                break
    except (ParentGone, BrokenPipeError):
        pass
    finally:
        if guard is not None:
            guard.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
