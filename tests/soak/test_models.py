"""Worlds of the models that are too large for `./run test`."""

from __future__ import annotations

import pytest

from tests.model.explore import explore
from tests.model.replication import LARGE_WORLDS, RULES, WITHOUT, WORLDS, Model


@pytest.mark.parametrize("name", LARGE_WORLDS)
def test_with_all_rules_what_was_acked_stays_and_readers_agree(name: str) -> None:
    found = explore(Model(WORLDS[name]), states_max=3_000_000)
    assert not found.violation, found.steps
    assert {"all acked", "two lead"} <= found.phases


@pytest.mark.parametrize("rule", [rule for rule in RULES if WITHOUT[rule][0] in LARGE_WORLDS])
def test_each_rule_left_out_breaks_it(rule: str) -> None:
    world, wrong = WITHOUT[rule]
    found = explore(Model(WORLDS[world], without=frozenset({rule})))
    assert wrong in found.violation
