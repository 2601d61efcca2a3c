"""Running `kafkalog` in tests: in this process, or as one of its own."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kafkalog.cli.main import run

KAFKALOG = [sys.executable, "-m", "kafkalog.cli"]


class Ran:
    """A command line run in this process: its exit code and what it wrote."""

    def __init__(self, capture: pytest.CaptureFixture[bytes], *arguments: str) -> None:
        capture.readouterr()
        self.code = run(arguments)
        written = capture.readouterr()
        self.out, self.err = written.out.decode(errors="surrogateescape"), written.err.decode()

    def fails_with(self, sentence: str) -> None:
        """It failed, with that in one line on stderr and nothing else."""
        assert self.code == 1
        assert sentence in self.err
        assert self.err.startswith("kafkalog: ") and self.err.count("\n") == 1, self.err


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """A file of these bytes as standard input."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(data)
    file.seek(0)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command as a process of its own; killed if the test leaves it running."""
    with subprocess.Popen(
        [*KAFKALOG, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
