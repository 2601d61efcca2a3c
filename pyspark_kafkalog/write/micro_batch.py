"""Which streaming query and micro-batch a task's job belongs to, from the properties that Spark gives the job. Pure.

The thread that runs a query sets three properties (Spark's `StreamExecution`, `MicroBatchExecution`): the query's id,
the number of the micro-batch, and a description with the query's name and the run's id. Jobs started in that thread
have them, and so have jobs of a `pyspark.InheritableThread` started there. Jobs of another Python thread have none of
them, nor have jobs of a `foreachBatch` function under Spark Connect, which runs in a process of its own.

Each run of a query has a session of its own, and a SQL job has its session's settings and tag whichever thread starts
it. So a job that writes a DataFrame of the micro-batch is known to be part of a query and of one run of it, even where
Spark does not report which query that is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyspark import TaskContext

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
DESCRIPTION = "spark.job.description"
TAGS = "spark.job.tags"
OF_A_QUERY = "spark.sql.streaming.internal.stateStore.partitions"
"""A setting that Spark makes in each query's session (`StreamExecution.runStream`), and documents as internal."""

NO_BATCH = -1

_DESCRIBED = re.compile(r"(?:(?P<name>.*)\n)?id = (?P<id>\S+)\nrunId = (?P<run_id>\S+)\nbatch = \S+", re.DOTALL)
_SESSION = re.compile(r"spark-session-([0-9a-f-]{36})")


class MicroBatch(NamedTuple):
    """Spark's report to a task about the query of its job.

    Attributes:
        query_id: empty outside any query, and if Spark does not report it.
        run_id: of the query's run; empty if it is not known.
        name: the query's; empty if it has none, or it is not known.
        batch_id: NO_BATCH if it is not known.
        is_of_query: whether the job is part of a query, or writes in a query's session.
        session_id: of the session of the query's run; empty outside any query.
    """

    query_id: str = ""
    run_id: str = ""
    name: str = ""
    batch_id: int = NO_BATCH
    is_of_query: bool = False
    session_id: str = ""

    @property
    def is_of_unknown_query(self) -> bool:
        """Whether the job is part of a query, and Spark does not report which one."""
        return self.is_of_query and not self.query_id


def micro_batch_of(task: TaskContext) -> MicroBatch:
    """The micro-batch whose job a task belongs to."""
    return micro_batch(task._localProperties or {})


def micro_batch(properties: Mapping[str, str]) -> MicroBatch:
    """The micro-batch of a job with these properties.

    The run is taken from the description that Spark gives the job. The job group has it too, but the user may set it,
    and it then stays set for the query's later batches. If the user has set the description, too, before the batch is
    written, neither run nor name are known.
    """
    query_id = properties.get(QUERY_ID) or ""
    batch_id = properties.get(BATCH_ID) or ""
    found = _DESCRIBED.fullmatch(properties.get(DESCRIPTION) or "")
    run_id, name = (found["run_id"], found["name"] or "") if found and found["id"] == query_id else ("", "")
    return MicroBatch(
        query_id,
        run_id,
        name,
        batch_id=int(batch_id) if query_id and batch_id else NO_BATCH,
        is_of_query=bool(query_id) or OF_A_QUERY in properties,
        session_id=_sessions(properties.get(TAGS) or "") if OF_A_QUERY in properties else "",
    )


def _sessions(tags: str) -> str:
    """The session ids in a job's tags, joined by '+': nested SQL executions have several."""
    return "+".join(sorted(found[1] for found in map(_SESSION.fullmatch, tags.split(",")) if found))
