"""Many histories of crash after crash; KAFKALOG_SOAK_HISTORIES makes them fewer for a quick look."""

from __future__ import annotations

import os

import pytest

from tests.crash.histories import History

pytestmark = pytest.mark.timeout(3600)
FIRST_SEED = 1000
COUNT = int(os.environ.get("KAFKALOG_SOAK_HISTORIES", 5000))


def test_no_crash_after_another_costs_what_was_synced_in_any_history() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + COUNT):
        try:
            History(seed).run()
        except AssertionError as error:
            raise AssertionError(f"history {seed}") from error
