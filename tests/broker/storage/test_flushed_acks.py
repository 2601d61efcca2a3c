"""Whether a log knows that all it acknowledged was durable before."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.storage.log_dir import LogDirectory
from kafkalog.errors import OutOfFiles
from tests.broker.replica.test_staged_writes import Raises
from tests.broker.storage.batches import TOPIC_ID, numbered, topic

FLUSHED = topic(flush_messages=1)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[LogDirectory]:
    opened = LogDirectory(tmp_path / "data")
    yield opened
    opened.close()


def noted(directory: LogDirectory) -> bool:
    return directory.acks_were_flushed(TOPIC_ID, 0)


@pytest.mark.parametrize("settings", [topic(), topic(flush_messages=2), FLUSHED])
def test_a_new_log_knows_it_if_its_topic_has_one_message_a_flush(directory: LogDirectory, settings: object) -> None:
    assert not noted(directory)
    directory.open_log(TOPIC_ID, 0, "t-0", settings, 0)  # type: ignore[arg-type]
    assert noted(directory) == (settings is FLUSHED)


def test_it_is_forgotten_before_an_ack_without_a_flush_and_known_again_once_all_is_flushed(
    directory: LogDirectory,
) -> None:
    log = directory.open_log(TOPIC_ID, 0, "t-0", FLUSHED, 0)
    log.update_settings(topic())
    assert not noted(directory)
    log.append([numbered(0)], 0)
    log.update_settings(FLUSHED)
    log.note_flushed_acks()
    assert not noted(directory), "the record may have been acknowledged"
    log.flush()
    log.note_flushed_acks()
    assert noted(directory)


def test_it_is_not_noted_of_records_from_before_a_setting_that_came_back(directory: LogDirectory) -> None:
    """The flusher may see neither of the two changes."""
    log = directory.open_log(TOPIC_ID, 0, "t-0", FLUSHED, 0)
    log.append([numbered(0)], 0)
    log.flush()
    log.update_settings(topic())
    log.append([numbered(1)], 0)
    log.update_settings(FLUSHED)
    log.note_flushed_acks()
    assert not noted(directory)
    log.truncate_to(1)
    log.note_flushed_acks()
    assert noted(directory)


def test_the_settings_stay_as_they_are_while_it_can_not_be_forgotten_durably(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = directory.open_log(TOPIC_ID, 0, "t-0", FLUSHED, 0)
    with monkeypatch.context() as patched:
        patched.setattr(directory.disk, "sync_dir", Raises(OSError(errno.EMFILE, "no descriptor left")))
        with pytest.raises(OutOfFiles):
            log.update_settings(topic())
        assert log.needs_flush_for_ack
    log.update_settings(topic())
    assert not log.needs_flush_for_ack and not noted(directory)


def test_it_is_forgotten_also_if_it_could_not_be_noted_durably(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = directory.open_log(TOPIC_ID, 0, "t-0", topic(), 0)
    log.update_settings(FLUSHED)
    with monkeypatch.context() as patched:
        patched.setattr(directory.disk, "sync_dir", Raises(OSError(errno.EMFILE, "no descriptor left")))
        with pytest.raises(OutOfFiles):
            log.note_flushed_acks()
    assert noted(directory)
    log.note_flushed_acks()
    log.update_settings(topic())
    assert not noted(directory)


@pytest.mark.parametrize("was_flushed", [True, False])
def test_a_setting_that_was_changed_while_the_log_was_closed(tmp_path: Path, was_flushed: bool) -> None:
    before, after = (FLUSHED, topic()) if was_flushed else (topic(), FLUSHED)
    first = LogDirectory(tmp_path / "data")
    first.open_log(TOPIC_ID, 0, "t-0", before, 0).append([numbered(0)], 0)
    first.close(clean=False)
    again = LogDirectory(tmp_path / "data")
    assert noted(again) == was_flushed
    again.open_log(TOPIC_ID, 0, "t-0", after, 0)
    assert not noted(again)
    again.tidy()
    assert noted(again) != was_flushed
    again.close()
