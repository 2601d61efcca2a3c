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
