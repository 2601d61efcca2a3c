"""How long `kafkalog local` takes until it serves, and a whole `./run demo`, in an environment that is set up."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.measure import by_turns, figure, seconds
from broker.local.zookeeper import with_parent
from broker.ports import free_port

ROOT = Path(__file__).resolve().parent.parent


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    taken = by_turns({"kafkalog local to serving": _local}, scale)
    if scale >= 0.1:
        taken |= by_turns({"a demo, environment made": lambda: seconds(_demo)}, scale, runs=3, warmups=0)
    for name, times in taken.items():
        yield figure(name, "s", times)


def _local() -> float:
    port = free_port("127.0.0.1", "the port of the broker")
    command = [str(Path(sys.executable).with_name("kafkalog")), "local", "--port", str(port)]
    process = None

    def start() -> None:
        nonlocal process
        process = subprocess.Popen(with_parent(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if "bootstrap" in line:
                return
        raise RuntimeError("kafkalog local has ended")

    try:
        return seconds(start)
    finally:
        if process is not None:
            process.send_signal(signal.SIGTERM)
            process.communicate()


def _demo() -> None:
    subprocess.run(with_parent([sys.executable, "examples/demo.py"]), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
