"""Decisions of transactions: read, written and listed in ZooKeeper. Any broker answers; it keeps none.

A write is a compare-and-set and nothing more: the rules of who may decide are the coordinator's.
"""

from __future__ import annotations

from dataclasses import replace

from broker.replica.host import Host
from kafkalog.errors import InvalidRequest
from kafkalog.wire import transactions_pb2 as pb
from kafkalog.wire.decisions import NO_BATCH, NO_VERSION, Decision, decision_from_wire, decision_to_wire
from kafkalog.zk import decisions

ID_LENGTH_MAX = 1000
_UUID_SIZE = 16


def read_decisions(request: pb.ReadDecisionsRequest, host: Host) -> pb.Decisions:
    """The last decisions of transactions. Raises InvalidRequest, ZooKeeperUnreachable."""
    for transactional_id in request.transactional_ids:
        _check_id(transactional_id)
    found = decisions.read_decisions(host.metadata.session, request.transactional_ids)
    return pb.Decisions(decisions=[decision_to_wire(decision) for decision in found])


def decide(request: pb.DecideRequest, host: Host) -> pb.DecideReply:
    """Write a decision over the version that it names, with the time of this broker. Raises DecisionMoved,
    InvalidRequest, ZooKeeperUnreachable: then whether it was written is unknown."""
    decision = decision_from_wire(request.decision)
    _check(decision)
    decision = replace(decision, decided_us=host.clock.now_us())
    return pb.DecideReply(version=decisions.write_decision(host.metadata.session, decision))


def list_decisions(request: pb.ListDecisionsRequest, host: Host) -> pb.Decisions:
    """The decisions of all transactions, by id. Raises ZooKeeperUnreachable."""
    found = decisions.list_decisions(host.metadata.session)
    return pb.Decisions(decisions=[decision_to_wire(decision) for decision in found])


def _check_id(transactional_id: str) -> None:
    if not 0 < len(transactional_id) <= ID_LENGTH_MAX:
        raise InvalidRequest(
            reason=f"a transactional id has 1 to {ID_LENGTH_MAX} characters, not {len(transactional_id)}"
        )


def _check(decision: Decision) -> None:
    _check_id(decision.transactional_id)
    if decision.version < NO_VERSION or decision.batch_id < NO_BATCH:
        raise InvalidRequest(reason=f"version {decision.version} and batch {decision.batch_id} make no decision")
    if len(decision.commit_uuid) != (0 if decision.batch_id == NO_BATCH else _UUID_SIZE):
        raise InvalidRequest(
            reason=f"a commit uuid has {_UUID_SIZE} bytes, and none where no batch is decided, "
            f"not {len(decision.commit_uuid)} (batch {decision.batch_id})"
        )
    for topic in (*decision.topics, *decision.applied):
        if len(topic.topic_id) != _UUID_SIZE or any(first > last for first, last in topic.partitions):
            raise InvalidRequest(reason=f"the partitions of topic '{topic.topic}' are no ranges of a topic id")
