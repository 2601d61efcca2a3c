"""The table of format levels and the constants of the formats are the same: a new version of one needs a new level."""

from __future__ import annotations

from pathlib import Path

from broker.staging import format as staged
from broker.storage import index, producer_state
from kafkalog.format import batch
from kafkalog.versions import FIRST, FORMAT_LEVELS, FORMATS, PROTOCOL, VersionRange


def test_the_newest_level_has_the_versions_that_are_written() -> None:
    assert FORMAT_LEVELS[FORMATS.newest] == {
        "record batch": batch.MAGIC,
        "index": index._VERSION,
        "producers": producer_state._VERSION,
        "staged data": staged._VERSION,
    }


def test_every_level_that_is_understood_is_in_the_table() -> None:
    assert list(FORMAT_LEVELS) == list(range(FORMATS.oldest, FORMATS.newest + 1))
    assert PROTOCOL.oldest == FORMATS.oldest == FIRST, "no version was ever released without"


def test_ranges() -> None:
    assert [VersionRange(2, 3).includes(each) for each in range(1, 5)] == [False, True, True, False]
    assert VersionRange(1, 2).highest_common(VersionRange(3, 4)) is None
    assert (str(VersionRange(1, 1)), str(VersionRange(1, 2))) == ("1", "1 to 2")


def test_the_docs_have_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "formats.md").read_text()
    assert f"| level | {' | '.join(FORMAT_LEVELS[FORMATS.newest])} |\n" in page
    for level, versions in FORMAT_LEVELS.items():
        assert f"\n| {level} | {' | '.join(map(str, versions.values()))} |\n" in page
