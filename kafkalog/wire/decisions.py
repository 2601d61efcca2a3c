"""Decisions of transactions to and from protobuf."""

from __future__ import annotations

from collections.abc import Iterable

from kafkalog.format.decisions import DecidedTopic, Decision, Writer
from kafkalog.wire import transactions_pb2 as pb


def decision_to_wire(decision: Decision) -> pb.Decision:
    message = pb.Decision(
        transactional_id=decision.transactional_id,
        version=decision.version,
        batch_id=decision.batch_id,
        commit_uuid=decision.commit_uuid,
        run_id=decision.run_id,
        fingerprint=decision.fingerprint,
        done=decision.done,
        replaced_runs=decision.replaced_runs,
        stays=decision.stays,
        decided_us=decision.decided_us,
        query_id=decision.query_id,
        forgotten=decision.forgotten,
        unknown=decision.unknown,
    )
    for writer in decision.writers:
        message.writers.add(**writer._asdict())
    message.topics.extend(_topic_to_wire(topic) for topic in decision.topics)
    message.applied.extend(_topic_to_wire(topic) for topic in decision.applied)
    return message


def _topic_to_wire(topic: DecidedTopic) -> pb.DecidedTopic:
    ranges = [pb.DecidedRange(first=first, last=last) for first, last in topic.partitions]
    return pb.DecidedTopic(topic_id=topic.topic_id, topic=topic.topic, partitions=ranges)


def decision_from_wire(message: pb.Decision) -> Decision:
    return Decision(
        transactional_id=message.transactional_id,
        version=message.version,
        batch_id=message.batch_id,
        commit_uuid=message.commit_uuid,
        run_id=message.run_id,
        fingerprint=message.fingerprint,
        done=message.done,
        topics=_topics_from_wire(message.topics),
        applied=_topics_from_wire(message.applied),
        replaced_runs=tuple(message.replaced_runs),
        stays=message.stays,
        decided_us=message.decided_us,
        query_id=message.query_id,
        forgotten=message.forgotten,
        writers=tuple(Writer(each.commit_uuid, each.run_id, each.session_id) for each in message.writers),
        unknown=message.unknown,
    )


def _topics_from_wire(messages: Iterable[pb.DecidedTopic]) -> tuple[DecidedTopic, ...]:
    return tuple(
        DecidedTopic(topic.topic_id, topic.topic, tuple((each.first, each.last) for each in topic.partitions))
        for topic in messages
    )
