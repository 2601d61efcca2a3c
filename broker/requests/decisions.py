"""Decisions of transactions: read, written and listed in ZooKeeper. Any broker answers; it keeps none.

A write is only a compare-and-set: the coordinator has the rules of who may decide.
"""

from __future__ import annotations

import json
from dataclasses import replace

from broker.replica.host import Host
from kafkalog.errors import InvalidRequest
from kafkalog.format.decisions import NO_BATCH, NO_VERSION, UUID_SIZE, Decision, check_transactional_id
from kafkalog.wire import transactions_pb2 as pb
from kafkalog.wire.decisions import decision_from_wire, decision_to_wire
from kafkalog.zk import decisions


def read_decisions(request: pb.ReadDecisionsRequest, host: Host) -> pb.Decisions:
    """The last decisions of transactions. Raises InvalidRequest, ZooKeeperUnreachable."""
    for transactional_id in request.transactional_ids:
        check_transactional_id(transactional_id)
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


def _check(decision: Decision) -> None:
    check_transactional_id(decision.transactional_id)
    if decision.version < NO_VERSION or decision.batch_id < NO_BATCH:
        reason = f"a decision's version and batch_id must be >= -1, not {decision.version} and {decision.batch_id}"
        raise InvalidRequest(reason=reason)
    if len(decision.commit_uuid) != (0 if decision.batch_id == NO_BATCH else UUID_SIZE):
        raise InvalidRequest(
            reason=f"the commit uuid of batch {decision.batch_id} has {len(decision.commit_uuid)} bytes; it must have "
            f"{UUID_SIZE}, or 0 if no batch is decided (batch {NO_BATCH})"
        )
    if decision.unknown and not _is_object(decision.unknown):
        raise InvalidRequest(reason=f"a decision's unknown fields must be a JSON object, not {decision.unknown[:50]!r}")
    for topic in (*decision.topics, *decision.applied):
        if len(topic.topic_id) != UUID_SIZE or any(first > last for first, last in topic.partitions):
            raise InvalidRequest(reason=f"topic '{topic.topic}' has an invalid topic id or range of partitions")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
