"""The protocol of consumer groups holds in every state of a small world, and no rule of it can be left out."""

from __future__ import annotations

import pytest

from tests.model.explore import explore
from tests.model.groups import RULES, Model, World

WORLDS = {
    "three join": World(members=3, joins=3),
    "one leaves, and comes back": World(leaves=1),
    "answers that are lost": World(joins=2, losses=2),
    "an answer that is lost amid records": World(partitions=1, records=2, joins=2, losses=1),
    "a lease that ends": World(partitions=1, stalls=1, losses=1),
    "a crash": World(joins=2, crashes=1),
    "a topic that grows": World(partitions=1, joins=2, grows=1),
}

NOT_ITS_OWN = "which is not its own"
WITHOUT = {
    "claim_checks_generation": ("answers that are lost", "and stays with"),
    "claim_waits": ("three join", NOT_ITS_OWN),
    "claims_are_repeated": ("an answer that is lost amid records", "and does not know it"),
    "own_claims_are_known": ("answers that are lost", "and stays with"),
    "stop_before_release": ("answers that are lost", NOT_ITS_OWN),
    "release_at_version": ("answers that are lost", NOT_ITS_OWN),
    "fenced_commit": ("answers that are lost", NOT_ITS_OWN),
    "commits_in_order": ("an answer that is lost amid records", "takes 0 back"),
    "start_read_after_claim": ("three join", "committed before"),
    "lease_by_own_clock": ("a lease that ends", NOT_ITS_OWN),
    "lapse_at_lease_version": ("a lease that ends", NOT_ITS_OWN),
    "lapse_frees_claims": ("a crash", "and stays with"),
    "new_partitions_from_zero": ("a topic that grows", "is skipped"),
}
"""The world in which a rule is missed, and what goes wrong there first."""


@pytest.mark.parametrize("name", list(WORLDS))
def test_with_all_rules_each_partition_has_one_owner_and_no_record_is_skipped(name: str) -> None:
    found = explore(Model(WORLDS[name]))
    assert not found.violation, found.steps
    assert found.states > 500
    if WORLDS[name].partitions + WORLDS[name].grows > 1:
        assert "moved" in found.phases


@pytest.mark.parametrize("rule", list(RULES))
def test_each_rule_left_out_breaks_it(rule: str) -> None:
    world, wrong = WITHOUT[rule]
    found = explore(Model(WORLDS[world], without=frozenset({rule})))
    assert wrong in found.violation
    assert found.steps
