"""Reads of a log up to an end that somebody else says, as a partition's readers are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.storage.log import Log
from broker.storage.log_dir import LogDirectory
from kafkalog.format.batch import iter_batches
from tests.broker.storage.batches import TOPIC_ID, numbered, topic

COUNT = 3


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """Two batches of three records."""
    directory = LogDirectory(tmp_path)
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    for first in (0, COUNT):
        log.append([numbered(first, COUNT)], log.last_epoch)
    yield log
    directory.close()


def ends(log: Log, offset: int, end: int) -> list[int]:
    """The end offsets of the batches that a read up to an end gives; its slice has whole ones only."""
    with log.reader.read(offset, 1 << 20, look=lambda: (log.reader.view, end)) as found:
        data = found.read()
    batches = list(iter_batches(memoryview(data)))
    assert sum(header.length for header, _ in batches) == len(data)
    return [header.end_offset for header, _ in batches]


def test_a_batch_is_read_if_it_ends_where_readers_may_go_and_not_if_it_ends_behind(log: Log) -> None:
    for offset in range(COUNT):
        assert ends(log, offset, 2 * COUNT) == [COUNT, 2 * COUNT]
        assert ends(log, offset, COUNT) == [COUNT]
    for offset in range(COUNT, 2 * COUNT):
        assert ends(log, offset, 2 * COUNT) == [2 * COUNT]
    for offset in range(2 * COUNT + 1):
        assert ends(log, offset, offset) == []


def test_of_a_batch_that_an_end_lies_within_nothing_is_read(log: Log) -> None:
    for end in (1, 2):
        assert ends(log, 0, end) == []
    for end in (COUNT + 1, COUNT + 2):
        assert ends(log, 0, end) == [COUNT]
        assert ends(log, COUNT, end) == []
