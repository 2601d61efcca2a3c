"""A list of records to the runs of its partitions: checked, and each run in the list's order. Pure.

The counterpart of `tables.py` for who has Python objects. Only records with keys are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kafkalog.client.config import Partitioner
from kafkalog.client.producer.partitioner import NO_KEY, chosen_partition, partition_for_key, partitions_for_keys
from kafkalog.errors import InvalidArgument
from kafkalog.format.columns import BINARY, binary_array

_AT_ONCE_MIN = 1000
"""Keys; of fewer than this, hashing them as an Arrow array takes longer than one by one."""


class Records(NamedTuple):
    """Records of one partition. `partition` is None: of whichever has its turn; `keys` is None: none has one."""

    partition: int | None
    values: list[bytes | None]
    keys: list[bytes | None] | None


def checked(what: str, given: Iterable[bytes | None], convert: Callable[[str, object], bytes]) -> list[bytes | None]:
    """The list that is given, with bytes and None in it. Raises InvalidArgument.

    Args:
        convert: makes bytes of what is not.
    """
    if isinstance(given, bytes | bytearray | memoryview | str):
        raise InvalidArgument(reason=f"{what} is {type(given).__name__}, not a list of bytes")
    try:
        found = given if given.__class__ is list else list(given)
    except TypeError:
        raise InvalidArgument(reason=f"{what} is {type(given).__name__}, not a list of bytes") from None
    assert isinstance(found, list)
    if set(map(type, found)) - {bytes, type(None)}:
        return [each if each is None else convert(f"one of the {what}", each) for each in found]
    return found


def by_partition(
    values: list[bytes | None], keys: list[bytes | None] | None, partitions: int, partitioner: Partitioner | None
) -> list[Records]:
    """The records of each partition, in their order.

    Args:
        partitioner: (key or None, number of partitions) -> partition; None: by the key, and those without one go
            wherever the turn is.
    """
    if partitioner is not None:
        numbers = [chosen_partition(partitioner, key, partitions) for key in keys or [None] * len(values)]
    elif keys is None or keys.count(None) == len(keys):
        return [Records(None, values, None)]
    elif len(keys) < _AT_ONCE_MIN:
        numbers = [NO_KEY if key is None else partition_for_key(key, partitions) for key in keys]
    else:
        numbers = partitions_for_keys(binary_array(BINARY, keys), partitions).tolist()
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(numbers):
        if number in rows:
            rows[number].append(row)
        else:
            rows[number] = [row]
    return [
        Records(None, [values[row] for row in of_it], None)
        if number == NO_KEY
        else Records(number, [values[row] for row in of_it], None if keys is None else [keys[row] for row in of_it])
        for number, of_it in rows.items()
    ]
