"""Decisions of transactions in ZooKeeper: one znode a transaction, every write of it a compare-and-set.

A znode is read whole and written whole, as JSON (docs/reference/formats.md). Who may decide what is the coordinator's
business (`client/transaction/coordinator.py`); a leader reads what was decided, and raises a version before it drops
what was prepared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kafkalog.errors import DecisionMoved
from kafkalog.events import get_logger
from kafkalog.format.decisions import BATCH_WRITE_KEPT_SECONDS, NO_VERSION, DecidedTopic, Decision, Writer
from kafkalog.zk import paths
from kafkalog.zk.session import BadVersion, NodeExists, NoNode, ZooKeeperSession

log = get_logger(__name__)

DECISION_KEPT_US = BATCH_WRITE_KEPT_SECONDS * 1_000_000
"""How long the decision of a batch write stays after it is done: a request of its coordinator may be late, or the
coordinator itself, and a broker that was away finds out that it may drop what it has of the batch. Leaders keep their
apply progress of it as long after its last append (`broker/storage/apply_progress.py:DONE_PROGRESS_KEPT_US`)."""
_PIECE = 500
"""Decisions that are read, and removed, side by side."""


def read_decision(session: ZooKeeperSession, transactional_id: str) -> Decision:
    """A transaction's last decision; version -1 and no batch if there is none."""
    [found] = read_decisions(session, [transactional_id])
    return found


def read_decisions(session: ZooKeeperSession, transactional_ids: Sequence[str]) -> list[Decision]:
    """`read_decision` of many, read at once."""
    found = session.get_many([paths.transaction(each) for each in transactional_ids])
    return [
        Decision(transactional_id) if content is None else _decision(transactional_id, *content)
        for transactional_id, content in zip(transactional_ids, found, strict=True)
    ]


def write_decision(session: ZooKeeperSession, decision: Decision) -> int:
    """Write a decision over exactly the version that it names; -1 makes it.

    Returns:
        the new version.

    Raises:
        DecisionMoved: the znode has another version, -1 if it is not there.
        ZooKeeperUnreachable: whether it was written is unknown; read it, and compare the commit uuid.
    """
    path, content = paths.transaction(decision.transactional_id), _content(decision)
    try:
        if decision.version == NO_VERSION:
            session.create(path, content)
            return 0
        return int(session.set(path, content, decision.version).version)
    except (NoNode, NodeExists, BadVersion):
        now = read_decision(session, decision.transactional_id)
    raise DecisionMoved(
        transactional_id=decision.transactional_id, expected=decision.version, version=now.version
    ) from None


def raise_version(session: ZooKeeperSession, decision: Decision) -> int:
    """Give a decision the next version with nothing else changed, so that nobody can decide on the one before; one
    that is absent is made, empty. Raises like `write_decision`."""
    return write_decision(session, decision)


def list_decisions(session: ZooKeeperSession) -> list[Decision]:
    """The decisions of all transactions, by id."""
    found = [decision for piece in _pieces(session) for decision in piece]
    return sorted(found, key=lambda decision: decision.transactional_id)


def _pieces(session: ZooKeeperSession) -> Iterator[list[Decision]]:
    """The decisions of all transactions, read in pieces as they are asked for."""
    try:
        names = session.children(paths.TRANSACTIONS)
    except NoNode:  # no broker of this version has connected yet
        return
    for start in range(0, len(names), _PIECE):
        piece = names[start : start + _PIECE]
        found = session.get_many([f"{paths.TRANSACTIONS}/{name}" for name in piece])
        yield [
            decision
            for name, content in zip(piece, found, strict=True)
            if content is not None and (decision := _readable(paths.transactional_id(name), *content)) is not None
        ]


def _readable(transactional_id: str, content: bytes, stat: Any) -> Decision | None:
    """A decision among others, which one that cannot be read must not keep from being used."""
    try:
        return _decision(transactional_id, content, stat)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("decision_not_readable", transactional_id=transactional_id, reason=repr(error))
        return None


def expired(decisions: Iterable[Decision], now_us: int) -> list[Decision]:
    """Those that may be forgotten: of batch writes, an hour after they were done, or raised with nothing decided.

    A stream's never: the query may start again after any time, and would write its last batch a second time.
    """
    return [
        decision
        for decision in decisions
        if not decision.stays and not decision.is_open and decision.decided_us + DECISION_KEPT_US < now_us
    ]


def forget_expired(session: ZooKeeperSession, now_us: int) -> Iterator[list[Decision]]:
    """Remove the decisions that are `expired`; any broker may do so, and several at once. One step reads some hundreds
    and yields those of them that it removed: there may be many, and who forgets them has other things to do."""
    for piece in _pieces(session):
        old = expired(piece, now_us)
        removed = session.delete_many([(paths.transaction(each.transactional_id), each.version) for each in old])
        yield [each for each, is_removed in zip(old, removed, strict=True) if is_removed]  # others are in use again


def _content(decision: Decision) -> bytes:
    fields = {
        "batch_id": decision.batch_id,
        "commit_uuid": decision.commit_uuid.hex(),
        "run_id": decision.run_id,
        "fingerprint": decision.fingerprint.hex(),
        "done": decision.done,
        "topics": _topics_to_json(decision.topics),
        "applied": _topics_to_json(decision.applied),
        "replaced_runs": decision.replaced_runs,
        "stays": decision.stays,
        "decided_us": decision.decided_us,
        "query_id": decision.query_id,
        "forgotten": decision.forgotten,
        "writers": [
            {"commit_uuid": each.commit_uuid.hex(), "run_id": each.run_id, "session_id": each.session_id}
            for each in decision.writers
        ],
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _topics_to_json(topics: Iterable[DecidedTopic]) -> list[dict[str, Any]]:
    return [
        {"topic_id": topic.topic_id.hex(), "topic": topic.topic, "partitions": topic.partitions} for topic in topics
    ]


def _topics(fields: Iterable[dict[str, Any]]) -> tuple[DecidedTopic, ...]:
    return tuple(
        DecidedTopic(
            bytes.fromhex(topic["topic_id"]),
            topic["topic"],
            tuple((first, last) for first, last in topic["partitions"]),
        )
        for topic in fields
    )


def _decision(transactional_id: str, content: bytes, stat: Any) -> Decision:
    fields = json.loads(content)
    return Decision(
        transactional_id=transactional_id,
        version=stat.version,
        batch_id=fields["batch_id"],
        commit_uuid=bytes.fromhex(fields["commit_uuid"]),
        run_id=fields["run_id"],
        fingerprint=bytes.fromhex(fields["fingerprint"]),
        done=fields["done"],
        topics=_topics(fields["topics"]),
        applied=_topics(fields["applied"]),
        replaced_runs=tuple(fields["replaced_runs"]),
        stays=fields["stays"],
        decided_us=fields["decided_us"] or stat.mtime * 1000,
        query_id=fields["query_id"],
        forgotten=fields["forgotten"],
        writers=tuple(
            Writer(bytes.fromhex(each["commit_uuid"]), each["run_id"], each["session_id"]) for each in fields["writers"]
        ),
    )
