"""Names of numbered writes: no two alike, and each says what it is of."""

from __future__ import annotations

import itertools

from kafkalog.format.numbered import NumberedName, parse, transactional_id

ID, OTHER = bytes(range(16)), bytes(16)


def test_a_name_says_what_it_is_of_whatever_the_application_is_called() -> None:
    apps = ["etl", "a b", "x:y", "a:t:" + ID.hex(), "line\nbreak", "a:t:" + ID.hex() + ":1", ":"]
    wanted = [NumberedName(*each) for each in itertools.product(apps, ["t", ID.hex()], [ID, OTHER], [0, 1, 12])]
    names = [transactional_id(*each) for each in wanted]
    assert len(set(names)) == len(names)
    assert [parse(name) for name in names] == wanted


def test_other_transactions_have_no_such_name() -> None:
    for name in ("spark-stream-app-x:t", "app-x:t", f"app-x:t:{'0' * 31}", f"app-x:t:{'0' * 32}:", "app-"):
        assert parse(name) is None
