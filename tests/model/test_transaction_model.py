"""The protocol of the exactly-once write holds in every state of a small world, and no rule of it can be left out."""

from __future__ import annotations

import pytest

from tests.model.explore import explore
from tests.model.transactions import RULES, Model, World

WORLDS = {
    "a task that is late, and a reaper": World(length=2, reaps=1),
    "a write that takes long": World(length=2, leaders=2, overdue=1),
    "a write to two topics that takes long": World(length=2, parts=2, by_topic=True, overdue=2),
    "a batch write": World(leaders=2, closes=True, restarts=0, timeouts=2, one_off=True),
    "a disk that goes bad": World(parts=2, damages=1),
    "a disk that goes bad amid an apply": World(parts=2, damages=1, kills=1, restarts=0),
    "a speculative twin": World(length=2, twins=2, restarts=0),
    "two drivers, two leaders": World(leaders=2),
    "a zombie over two batches": World(batches=2),
    "a zombie over three batches": World(batches=3, tidy=True, forgetful=True),
    "crashes amid an apply": World(parts=2, kills=1, power_losses=1),
    "prepared sets that time out": World(timeouts=2),
    "a copy of the checkpoint": World(batches=2, restarts=0, copies=1),
    "aborts, and an old znode": World(discards=True, expires=True),
    "numbered writes of two queries": World(batches=2, restarts=0, copies=1, numbered=True),
    "numbered writes of an older checkpoint": World(batches=2, restarts=0, copies=1, numbered=True, restored=True),
    "numbered writes, and restarts": World(batches=2, numbered=True, tidy=True),
    "two numbered writes under one name": World(numbered=True, writes=2, tidy=True),
    "progress that is forgotten": World(parts=2, restarts=0, kills=1, power_losses=1, forgets=1),
    "leaders that are left alone": World(leaders=2, closes=True, power_losses=1, restarts=0),
    "leaders that are left alone, and a zombie": World(batches=2, closes=True),
    "leaders that are left alone, and a timeout": World(leaders=2, closes=True, timeouts=1, tidy=True),
    "a commit that is given up": World(parts=2, gives_up=True, timeouts=1),
}

WITHOUT = {
    "fresh_uuid_per_attempt": ("a task that is late, and a reaper", "torn"),
    "prepare_checks_parts": ("a task that is late, and a reaper", "lost: decided"),
    "keep_prepared": ("a task that is late, and a reaper", "lost: decided"),
    "parts_live_with_write": ("a write that takes long", "expired while its write went on"),
    "renewed_by_family": ("a write to two topics that takes long", "expired while its write went on"),
    "gone_was_done": ("a batch write", "although it is there: a retry doubles it"),
    "outlives_late_requests": ("a batch write", "lost: decided"),
    "decided_soon": ("a batch write", "lost: decided"),
    "not_asked_again_late": ("a batch write", "decided a second time"),
    "whole_set_checked": ("a disk that goes bad", "half of batch 0 is shown"),
    "lost_hides_nothing": ("a disk that goes bad amid an apply", "hides the partition for good"),
    "raise_version_first": ("prepared sets that time out", "lost: decided"),
    "drop_only_on_news": ("a zombie over two batches", "lost: decided"),
    "cas_on_version": ("two drivers, two leaders", "although it was replaced"),
    "reread_after_unknown": ("two drivers, two leaders", "torn"),
    "reprepare_at_new_version": ("prepared sets that time out", "lost: decided"),
    "keep_newer_version": ("prepared sets that time out", "lost: decided"),
    "roll_forward_recorded": ("two drivers, two leaders", "torn"),
    "fail_when_recorded_higher": ("a copy of the checkpoint", "of another input"),
    "run_superseded": ("a zombie over three batches", "although it was replaced"),
    "replaced_runs_in_znode": ("a zombie over three batches", "although it was replaced"),
    "fingerprint": ("a copy of the checkpoint", "of another input"),
    "apply_resumes_after_mark": ("crashes amid an apply", "twice"),
    "marks_rebuilt": ("crashes amid an apply", "twice"),
    "mark_kept_with_set": ("progress that is forgotten", "twice"),
    "drop_synced_before_mark": ("progress that is forgotten", "twice"),
    "staged_kept_until_done": ("crashes amid an apply", "lost: decided"),
    "done_before_next": ("a zombie over two batches", "out of order"),
    "abort_spares_prepared": ("aborts, and an old znode", "lost: decided"),
    "streams_never_expire": ("aborts, and an old znode", "lost: decided"),
    "query_beside_version": ("numbered writes of two queries", "of another input"),
    "only_last_is_skipped": ("numbered writes of an older checkpoint", "of another input"),
    "one_write_a_run": ("two numbered writes under one name", "ended well, and the rows of"),
    "skip_is_recorded": ("two numbered writes under one name", "ended well, and the rows of"),
    "writes_of_all_runs": ("two numbered writes under one name", "ended well, and the rows of"),
    "any_attempt_counts": ("a commit that is given up", "of another attempt is there although it was given up"),
    "fence_before_giving_up": ("a commit that is given up", "given up as undecided: a retry doubles it"),
    "look_before_giving_up": ("a commit that is given up", "given up as undecided: a retry doubles it"),
    "applied_once_synced": ("leaders that are left alone", "lost"),
    "done_by_the_last": ("leaders that are left alone", "lost"),
    "deadline_by_progress": ("a commit that is given up", "while a leader gets on with it"),
}
"""The world in which a rule is missed, and what goes wrong there first."""

ENDS = {
    "a zombie over three batches": {"end", "superseded"},
    "a batch write": {"end", "unknown", "late"},
    "a disk that goes bad": {"end", "lost"},
    "a disk that goes bad amid an apply": {"end", "lost"},
    "a copy of the checkpoint": {"end", "superseded", "copied"},
    "numbered writes of two queries": {"end", "superseded", "another's"},
    "numbered writes of an older checkpoint": {"end", "superseded", "copied"},
    "two numbered writes under one name": {"end", "second"},
    "a commit that is given up": {"end", "given up", "given up, decided"},
}
"""Ends that have to be reached, or else a world shows less than it seems to."""


@pytest.mark.parametrize("name", list(WORLDS))
def test_with_all_rules_no_batch_is_lost_doubled_torn_or_out_of_order(name: str) -> None:
    found = explore(Model(WORLDS[name]))
    assert not found.violation, found.steps
    assert ENDS.get(name, {"end"}) <= found.phases
    assert found.states > 100
    assert "second" not in found.phases or WORLDS[name].writes > 1


@pytest.mark.parametrize("rule", list(RULES))
def test_each_rule_left_out_breaks_it(rule: str) -> None:
    world, wrong = WITHOUT[rule]
    found = explore(Model(WORLDS[world], without=frozenset({rule})))
    assert wrong in found.violation
    assert found.steps
