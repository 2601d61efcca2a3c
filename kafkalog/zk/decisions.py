"""Decisions of transactions in ZooKeeper: one znode for each transaction. Every write of it is a compare-and-set.

A znode is read and written as a whole, as JSON (docs/reference/formats.md). The coordinator has the rules of deciding
(`client/transaction/coordinator.py`). A leader reads decisions, and raises a decision's version before it drops a
prepared set.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kafkalog.errors import DecisionMoved, UnreadableZnode
from kafkalog.events import get_logger
from kafkalog.format.decisions import BATCH_WRITE_KEPT_SECONDS, NO_VERSION, DecidedTopic, Decision, Writer
from kafkalog.zk import paths
from kafkalog.zk.content import fields_of, to_json, unknown_in
from kafkalog.zk.session import BadVersion, NodeExists, NoNode, ZooKeeperSession

log = get_logger(__name__)

DECISION_KEPT_US = BATCH_WRITE_KEPT_SECONDS * 1_000_000
"""The decision of a batch write is kept this long after it is done, for two reasons. Its coordinator, or one of the
coordinator's requests, may be late. A broker that was away learns from it that it may drop its staged data. Leaders
keep the apply progress as long after the last append (`broker/storage/apply_progress.py:DONE_PROGRESS_KEPT_US`)."""
_FIELDS = frozenset(
    {"batch_id", "commit_uuid", "run_id", "fingerprint", "done", "topics", "applied", "replaced_runs", "stays"}
    | {"decided_us", "query_id", "forgotten", "writers"}
)
_CHUNK = 500
"""Number of decisions that are read, or removed, at once."""


def read_decision(session: ZooKeeperSession, transactional_id: str) -> Decision:
    """A transaction's last decision. If there is none, a Decision with version -1 and no batch."""
    [found] = read_decisions(session, [transactional_id])
    return found


def read_decisions(session: ZooKeeperSession, transactional_ids: Sequence[str]) -> list[Decision]:
    """The last decisions of several transactions, in the given order; see `read_decision`."""
    found = session.get_many([paths.transaction(each) for each in transactional_ids])
    return [
        Decision(transactional_id) if content is None else _decision(transactional_id, *content)
        for transactional_id, content in zip(transactional_ids, found, strict=True)
    ]


def write_decision(session: ZooKeeperSession, decision: Decision) -> int:
    """Write a decision if the znode still has the version in `decision`. Version -1 creates the znode.

    Returns:
        The new version.

    Raises:
        DecisionMoved: the znode has another version (-1 if it does not exist).
        ZooKeeperUnreachable: it is unknown whether the decision was written. Read it, and compare the commit uuid.
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
    """Write a decision unchanged, which gives its znode the next version, so that a coordinator cannot decide on the
    version before. If there is no znode, an empty one is created. Raises the errors of `write_decision`."""
    return write_decision(session, decision)


def list_decisions(session: ZooKeeperSession) -> list[Decision]:
    """The decisions of all transactions, sorted by id."""
    found = [decision for chunk in _chunks(session) for decision in chunk]
    return sorted(found, key=lambda decision: decision.transactional_id)


def _chunks(session: ZooKeeperSession) -> Iterator[list[Decision]]:
    """The decisions of all transactions in chunks, each read when it is requested."""
    try:
        names = session.children(paths.TRANSACTIONS)
    except NoNode:  # no broker of this version has connected yet
        return
    for start in range(0, len(names), _CHUNK):
        chunk = names[start : start + _CHUNK]
        found = session.get_many([f"{paths.TRANSACTIONS}/{name}" for name in chunk])
        yield [
            decision
            for name, content in zip(chunk, found, strict=True)
            if content is not None and (decision := _readable(paths.transactional_id(name), *content)) is not None
        ]


def _readable(transactional_id: str, content: bytes, stat: Any) -> Decision | None:
    """Parse a decision; None if it cannot be parsed, which must not prevent the use of other decisions."""
    try:
        return _decision(transactional_id, content, stat)
    except UnreadableZnode as error:
        log.warning("decision_not_readable", transactional_id=transactional_id, reason=str(error))
        return None


def expired(decisions: Iterable[Decision], now_us: int) -> list[Decision]:
    """The decisions that may be forgotten: those of batch writes, an hour after they were done. A decision with nothing
    decided may be forgotten an hour after its last change.

    A stream's decision is never forgotten: the query may be restarted after any time, and would then write its last
    micro-batch a second time. Nor is that of a numbered write.
    """
    return [
        decision
        for decision in decisions
        if not decision.stays and not decision.is_open and decision.decided_us + DECISION_KEPT_US < now_us
    ]


def forget_expired(session: ZooKeeperSession, now_us: int) -> Iterator[list[Decision]]:
    """Delete the decisions that are `expired`. Any broker may do this, and several may at the same time.

    Each step of the iterator reads up to 500 decisions and yields those of them that it deleted: there may be many, and
    the caller can do other work between the steps.
    """
    for chunk in _chunks(session):
        old = expired(chunk, now_us)
        removed = session.delete_many([(paths.transaction(each.transactional_id), each.version) for each in old])
        yield [each for each, is_removed in zip(old, removed, strict=True) if is_removed]  # others are in use again


def _content(decision: Decision) -> bytes:
    fields = {
        **(json.loads(decision.unknown) if decision.unknown else {}),
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
    return to_json(fields)


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
    with fields_of(paths.transaction(transactional_id), content) as fields:
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
                Writer(bytes.fromhex(each["commit_uuid"]), each["run_id"], each["session_id"])
                for each in fields["writers"]
            ),
            unknown=json.dumps(unknown, sort_keys=True) if (unknown := unknown_in(fields, _FIELDS)) else "",
        )
