"""Which query a job belongs to, by its properties as Spark 4.3 gives them."""

from __future__ import annotations

import pytest

from pyspark_kafkalog.write.micro_batch import (
    BATCH_ID,
    DESCRIPTION,
    NO_BATCH,
    OF_A_QUERY,
    QUERY_ID,
    TAGS,
    MicroBatch,
    micro_batch,
)

SESSION = "0a1b2c3d-0000-4000-8000-0123456789ab"
OTHER_SESSION = "1a1b2c3d-0000-4000-8000-0123456789ab"
IN_A_QUERY = {QUERY_ID: "q", BATCH_ID: "7", DESCRIPTION: "\nid = q\nrunId = r\nbatch = 7"}
OF_ITS_SESSION = {OF_A_QUERY: "200", TAGS: f"spark-session-{SESSION},spark-session-{SESSION}-execution-root-id-12"}


def test_the_thread_of_a_query_gives_its_jobs_all_that_there_is_to_know() -> None:
    found = micro_batch({**IN_A_QUERY, **OF_ITS_SESSION})
    assert found == MicroBatch("q", "r", "", 7, is_of_query=True, session_id=SESSION)
    assert not found.is_of_unknown_query


@pytest.mark.parametrize(
    ("description", "run_id", "name"),
    [
        ("id = q\nrunId = r\nbatch = 7", "r", ""),
        ("named\nid = q\nrunId = r\nbatch = init", "r", "named"),
        ("id = x\nid = q\nrunId = r\nbatch = 7", "r", "id = x"),
        ("of two\nlines\nid = q\nrunId = r\nbatch = 7", "r", "of two\nlines"),
        ("the user's", "", ""),
        ("the user's\nrunId = s", "", ""),
        ("id = another\nrunId = r\nbatch = 7", "", ""),
        ("", "", ""),
    ],
)
def test_run_and_name_stand_in_the_description(description: str, run_id: str, name: str) -> None:
    found = micro_batch({**IN_A_QUERY, DESCRIPTION: description})
    assert (found.query_id, found.batch_id, found.run_id, found.name) == ("q", 7, run_id, name)


def test_a_job_in_a_querys_session_is_of_a_query_and_of_one_run_of_it_though_none_is_named() -> None:
    found = micro_batch({**OF_ITS_SESSION, DESCRIPTION: "Spark Connect - ..."})
    assert found == MicroBatch(is_of_query=True, session_id=SESSION)
    assert found.is_of_unknown_query
    nested = micro_batch({OF_A_QUERY: "2", TAGS: f"mine,spark-session-{OTHER_SESSION},spark-session-{SESSION}"})
    assert nested.session_id == f"{SESSION}+{OTHER_SESSION}"
    assert micro_batch({OF_A_QUERY: "2"}).is_of_unknown_query


def test_a_job_outside_any_query_is_of_none() -> None:
    found = micro_batch({TAGS: OF_ITS_SESSION[TAGS], DESCRIPTION: "id = q\nrunId = r\nbatch = 7"})
    assert found == MicroBatch(batch_id=NO_BATCH)
    assert not found.is_of_unknown_query
