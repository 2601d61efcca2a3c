from __future__ import annotations

import pytest

from tests.crash.histories import History

LOST_A_RANGE = 672
"""Holes of two power cuts, and an index that the second one took, once cost 54 records between the holes."""


@pytest.mark.parametrize("seed", range(20))
def test_no_crash_after_another_costs_what_was_synced(seed: int) -> None:
    History(seed).run()


def test_an_index_that_a_second_power_cut_took_costs_nothing_between_two_holes() -> None:
    History(LOST_A_RANGE, tidied=False).run()
