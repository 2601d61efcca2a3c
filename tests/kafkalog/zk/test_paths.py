"""Names that become znodes."""

from __future__ import annotations

import pytest

from kafkalog.zk import paths


@pytest.mark.parametrize("name", ["t", "a.b_c-D9", "x" * 249, "..."])
def test_valid_names(name: str) -> None:
    assert paths.is_valid_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ü", "x" * 250, "a\n", "a\0"])
def test_invalid_names(name: str) -> None:
    assert not paths.is_valid_name(name)


def test_the_path_of_a_state_names_its_partition() -> None:
    topic_id = bytes(range(16))
    path = paths.partition_state("a.topic-1", topic_id, 12)
    assert paths.partition_of_state(path) == ("a.topic-1", topic_id, 12)
    for other in (paths.topic("t"), paths.partition("t", topic_id, 12), paths.BROKER_IDS, path + "/x", "/x" + path):
        assert paths.partition_of_state(other) is None
