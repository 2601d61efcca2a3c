"""The processes of a peer over one temporary folder.

They die with the thread that started them, and a sweeper removes the folder once they are gone, however this process
ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from bench.measure import NotAvailable
from broker.local.sweeper import swept_folder
from broker.local.zookeeper import terminate, with_parent

_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 30.0


class PeerProcesses(ABC):
    """As a context manager: the processes live inside the block. Subclasses start them in `_start`.

    Args:
        name: the peer's, as errors name it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._servers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.folder, self._sweeper, self._keep_fd = swept_folder(f"kafkalog-{self._name.lower()}-")
        self._log = self.folder / "server.log"
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def pids(self) -> list[int]:
        """Process ids of the servers."""
        return [process.pid for process in self._servers]

    @abstractmethod
    def _start(self) -> None:
        """Start the servers, and wait until they serve. Raises NotAvailable."""

    def _run(self, command: list[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process; what it prints goes to the log."""
        with self._log.open("ab") as output:
            return subprocess.Popen(
                with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                pass_fds=(self._keep_fd,),
                start_new_session=True,
            )

    def _run_to_end(self, command: list[str], doing: str) -> None:
        """Raises NotAvailable."""
        ran = self._run(command)
        try:
            failed = ran.wait(_START_TIMEOUT) != 0
        except BaseException:
            ran.kill()
            ran.wait()
            raise
        if failed:
            raise NotAvailable(f"{self._name}: {doing} failed: {self._last_line()}")

    def _serve(self, command: list[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a server, which is stopped at the end of the block."""
        self._servers.append(self._run(command, environment))
        return self._servers[-1]

    def _wait_ready(self, address: str, process: subprocess.Popen[bytes]) -> None:
        """Return once a server listens. Raises NotAvailable: it has ended, or does not in its time."""
        deadline = time.monotonic() + _START_TIMEOUT
        host, port = address.split(":")
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1.0).close()
                return
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise NotAvailable(f"{self._name} does not start here: {self._last_line()}") from None
            # The kernel wakes nobody when another program begins to listen, and these servers signal it to no parent:
            # so this connects until it can. It ends when the server does, or at the deadline.
            time.sleep(0.05)

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return lines[-1] if lines else "it logged nothing"

    def _stop(self) -> None:
        os.close(self._keep_fd)
        for process in reversed(self._servers):
            terminate(process, _STOP_TIMEOUT)
        self._sweeper.wait()
