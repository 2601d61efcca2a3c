"""Keys to partitions: the documented rule, one at a time and all at once."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.client.producer.partitioner import NO_KEY, crc32c_of_each, partition_for_key, partitions_for_keys


def test_the_rule_is_crc_32c_modulo_the_partitions() -> None:
    assert crc32c_of_each(pa.array([b"123456789"])).tolist() == [0xE3069283]  # the polynomial's published check value
    assert partition_for_key(b"123456789", 7) == 0xE3069283 % 7
    assert [partition_for_key(key, 4) for key in (b"", b"AA", b"UA", b"\x00")] == [0, 2, 3, 1]


@given(st.lists(st.none() | st.binary(max_size=30), max_size=80), st.integers(1, 1000), st.integers(0, 3))
def test_an_array_goes_where_its_keys_go(keys: list[bytes | None], partitions: int, skipped: int) -> None:
    found = partitions_for_keys(pa.array(keys, pa.binary()).slice(skipped), partitions)
    assert found.dtype == np.int32
    assert found.tolist() == [NO_KEY if key is None else partition_for_key(key, partitions) for key in keys[skipped:]]


@pytest.mark.parametrize("lengths", [(8, 8), (36, 36), (0, 25), (200, 203)])
@pytest.mark.parametrize("distinct", [3, 5000])
def test_many_keys_at_once(lengths: tuple[int, int], distinct: int) -> None:
    dice = random.Random(1)
    pool = [dice.randbytes(dice.randint(*lengths)) for _ in range(distinct)]
    keys = [dice.choice(pool) if dice.random() < 0.98 else None for _ in range(5000)]
    found = partitions_for_keys(pa.array(keys, pa.binary()), 13)
    assert found.tolist() == [NO_KEY if key is None else partition_for_key(key, 13) for key in keys]


def test_keys_spread() -> None:
    found = partitions_for_keys(pa.array([b"user-%d" % number for number in range(40_000)]), 8)
    counts = np.bincount(found, minlength=8)
    assert counts.min() > 4500
    assert counts.max() < 5500
