"""Producer ids: a transaction's is its own and meets no broker's; a numbered write's says which application's it is."""

from __future__ import annotations

import itertools

from kafkalog.format.numbered import transactional_id
from kafkalog.format.producer_ids import family_of, family_of_application, new_producer_id, producer_id_of


def test_a_transactions_producer_id_is_its_own_and_meets_no_brokers() -> None:
    ids = [f"spark-stream-{number}" for number in range(1000)] + ["app-ünï/code-t"]
    found = {producer_id_of(each) for each in ids}
    assert len(found) == len(ids)
    assert all(1 << 62 <= each < 1 << 63 for each in found)
    assert producer_id_of("spark-stream-0") == 0x5EB5B955B3BA3A0B
    assert producer_id_of(transactional_id("etl", "t", bytes(16))) == 0x7B545ED6176EADB4
    given_out = [new_producer_id() for _ in range(100)]
    assert all(0 <= each < 1 << 62 for each in given_out)
    assert max(given_out) >= 1 << 61  # a range that is too small lets two of them meet


def test_numbered_writes_are_of_their_applications_family_and_other_transactions_of_one_each() -> None:
    apps = ["etl", "a b", "x:y", "app-etl", "ünï"]
    topics = [(f"t{number}", number.to_bytes(16, "big")) for number in range(50)]
    for app in apps:
        names = [transactional_id(app, *topic, generation) for topic in topics for generation in range(3)]
        found = [producer_id_of(name) for name in names]
        assert len(set(found)) == len(found)
        assert {family_of(each) for each in found} == {family_of_application(app)}
    others = ["spark-stream-0", "spark-stream-1", "etl", "app-etl:t"]
    families = [*map(family_of_application, apps), *(family_of(producer_id_of(name)) for name in others)]
    assert len(set(families)) == len(families)
    assert all(1 << 31 <= family < 1 << 32 for family in families)


def test_the_counts_that_follow_a_forgotten_one_never_have_its_producer_id() -> None:
    """A leader that took one for the other would take what is written for written already."""
    found = [producer_id_of(transactional_id("etl", "t", bytes(16), generation)) for generation in range(100)]
    assert {(after - before) % (1 << 31) for before, after in itertools.pairwise(found)} == {1}
