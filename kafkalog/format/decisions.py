"""The decision of a transaction: the batch decided last, its partitions, and whether all of them have it. Only data:
`wire/decisions.py` converts it to and from protobuf, `zk/decisions.py` keeps it in ZooKeeper. The coordinator has the
rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from kafkalog.errors import InvalidRequest

ID_LENGTH_MAX = 1000
UUID_SIZE = 16
"""Of a topic's id, a commit attempt, a staged part."""
NO_BATCH = -1
NO_VERSION = -1
BATCH_WRITE_KEPT_SECONDS = 3600
"""How long the decision of a batch write stays after it is done. Its coordinator counts on half of that."""


def check_transactional_id(transactional_id: str) -> None:
    """Raise InvalidRequest if a transactional id is empty or too long."""
    if not 0 < len(transactional_id) <= ID_LENGTH_MAX:
        raise InvalidRequest(
            reason=f"a transactional id must have 1 to {ID_LENGTH_MAX} characters, not {len(transactional_id)}"
        )


@dataclass(frozen=True)
class DecidedTopic:
    """The partitions of a topic for which a batch has parts, as ranges (first, last), both inclusive."""

    topic_id: bytes
    topic: str
    partitions: tuple[tuple[int, int], ...]

    def numbers(self) -> list[int]:
        return [number for first, last in self.partitions for number in range(first, last + 1)]


class Writer(NamedTuple):
    """The one write of a batch in a run of a query: it wrote the batch, or was skipped.

    Attributes:
        commit_uuid: of the write's attempt to commit.
        run_id: empty if it is not known.
        session_id: another name of the run; empty if it is not known.
    """

    commit_uuid: bytes
    run_id: str = ""
    session_id: str = ""

    def is_in_run_of(self, other: Writer) -> bool:
        """Whether both are known to belong to the same run."""
        if self.run_id and other.run_id:
            return self.run_id == other.run_id
        return bool(self.session_id) and self.session_id == other.session_id


@dataclass(frozen=True)
class Decision:
    """The last decision of a transaction.

    Attributes:
        version: of its znode, which the next write has to name; -1: there is none.
        batch_id: -1: nothing was decided yet.
        commit_uuid: of the attempt that decided, 16 bytes.
        run_id: of the run that decided; of the newest known run if the one that decided is not known.
        query_id: of the query whose batch it is; empty for a write outside any query.
        fingerprint: of the batch's input; empty if it is not known.
        done: whether every partition has it.
        replaced_runs: fenced runs, the newest last.
        stays: the decision is never forgotten (streams and numbered writes).
        decided_us: when it was last written.
        applied: partitions whose leaders have reported that they have the open batch; others may have it too.
        forgotten: nothing is decided under this id any more; a numbered write continues under the next id
            (`format/numbered.py`).
        writers: of a numbered write of a query: each run's write of the batch, the newest last.
        unknown: the fields of its znode that this version does not know, as a JSON object; empty: there are none. They
            are written again with the next decision.
    """

    transactional_id: str
    version: int = NO_VERSION
    batch_id: int = NO_BATCH
    commit_uuid: bytes = b""
    run_id: str = ""
    fingerprint: bytes = b""
    done: bool = False
    topics: tuple[DecidedTopic, ...] = ()
    replaced_runs: tuple[str, ...] = ()
    stays: bool = False
    decided_us: int = 0
    query_id: str = ""
    forgotten: bool = False
    writers: tuple[Writer, ...] = ()
    applied: tuple[DecidedTopic, ...] = ()
    unknown: str = ""

    def has(self, topic_id: bytes, partition: int) -> bool:
        """Whether the batch has parts for a partition."""
        return _among(self.topics, topic_id, partition)

    def has_applied(self, topic_id: bytes, partition: int) -> bool:
        """Whether the leader of a partition has reported that it has the open batch."""
        return _among(self.applied, topic_id, partition)

    @property
    def is_open(self) -> bool:
        """Whether some partition may not have the decided batch yet."""
        return self.batch_id != NO_BATCH and not self.done


def _among(topics: Iterable[DecidedTopic], topic_id: bytes, partition: int) -> bool:
    return any(
        first <= partition <= last for topic in topics if topic.topic_id == topic_id for first, last in topic.partitions
    )


def with_applied(decision: Decision, has: Callable[[bytes, int], bool]) -> Decision:
    """An open decision, with those partitions added to `applied` for which `has(topic_id, number)` is true. It is done
    when all of its partitions are applied."""

    def is_applied(topic_id: bytes, number: int) -> bool:
        return decision.has_applied(topic_id, number) or has(topic_id, number)

    applied = tuple(
        DecidedTopic(topic.topic_id, topic.topic, ranges(numbers))
        for topic in decision.topics
        if (numbers := [number for number in topic.numbers() if is_applied(topic.topic_id, number)])
    )
    is_done = sum(len(topic.numbers()) for topic in applied) == sum(len(topic.numbers()) for topic in decision.topics)
    return replace(decision, done=True, applied=()) if is_done else replace(decision, applied=applied)


def ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Partition numbers as ranges (first, last), both inclusive."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)
