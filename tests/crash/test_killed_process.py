"""A real process, real files, a real kill -9 in the middle of appends: what was acked is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from broker.storage.dump import verify
from broker.storage.log_dir import LogDirectory
from tests.broker.storage.batches import TOPIC_ID, read_all, topic

ROOT = Path(__file__).resolve().parents[2]

_APPEND_FOR_EVER = """
import sys
from broker.storage.log_dir import LogDirectory
from tests.broker.storage.batches import TOPIC_ID, numbered, topic

directory = LogDirectory(sys.argv[1])
directory.start()
log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
flush = sys.argv[2] == "flush"
while True:
    log.append([numbered(log.end_offset, 3), numbered(log.end_offset + 3, 5)], 0)
    if flush:
        log.flush()
    print(log.end_offset, flush=True)
"""


@pytest.mark.parametrize("mode", ["flush", "written"])
def test_kill_in_the_middle_of_appends_loses_nothing_acked(tmp_path: Path, mode: str) -> None:
    for acks in (1, 100):
        process = subprocess.Popen(
            [sys.executable, "-c", _APPEND_FOR_EVER, str(tmp_path), mode],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        acked = 0
        for _ in range(acks):
            acked = int(process.stdout.readline())
        process.kill()
        acked = max([acked, *(int(line) for line in process.stdout.read().split("\n") if line.endswith("0") and line)])
        process.wait()
        process.stdout.close()
        directory = LogDirectory(tmp_path)
        assert not directory.was_clean
        log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 1)
        assert log.end_offset >= acked > 0
        assert read_all(log) == {offset: b"%020d" % offset for offset in range(log.end_offset)}
        directory.close()
        assert not verify(tmp_path).problems
