"""Replication holds in every state of a small world, and no rule of it can be left out. `tests/soak/test_models.py` has
the larger worlds."""

from __future__ import annotations

import pytest

from tests.model.explore import explore
from tests.model.replication import LARGE_WORLDS, RULES, WITHOUT, WORLDS, Model


@pytest.mark.parametrize("name", [name for name in WORLDS if name not in LARGE_WORLDS])
def test_with_all_rules_what_was_acked_stays_and_readers_agree(name: str) -> None:
    found = explore(Model(WORLDS[name]))
    assert not found.violation, found.steps
    assert found.states > 400
    assert {"all acked", "two lead"} <= found.phases


@pytest.mark.parametrize("rule", [rule for rule in RULES if WITHOUT[rule][0] not in LARGE_WORLDS])
def test_each_rule_left_out_breaks_it(rule: str) -> None:
    world, wrong = WITHOUT[rule]
    found = explore(Model(WORLDS[world], without=frozenset({rule})))
    assert wrong in found.violation
    assert found.steps
