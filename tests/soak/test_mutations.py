"""Mistakes made in the pure modules, one at a time: at least 85 of 100 are seen by a test that starts no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import mutations
from tests.soak.mutations import Copy

pytestmark = pytest.mark.timeout(7200)
FLOOR = 0.85


def test_the_tests_see_most_mistakes_in_the_pure_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Copy(tmp_path)
    scores = copy.run()
    with capsys.disabled():
        print(f"\n{mutations.table(scores)}")
    assert all(score.made for score in scores), "in some module no mistake was made"
    seen, made = sum(score.seen for score in scores), sum(score.made for score in scores)
    if seen < FLOOR * made:
        for name in (name for score in scores for name in score.survivors):
            print(f"\n{name}\n{copy.difference(name)}")
    assert seen >= FLOOR * made
