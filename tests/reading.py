"""All that a topic of a running cluster has, read as its users read it."""

from __future__ import annotations

from kafkalog import Admin, Consumer, Message, TopicPartition


def messages_of(servers: str, topic: str) -> dict[int, list[Message]]:
    """A topic's records by partition, in order: every offset from the first that is kept to the end it has now."""
    with Admin(servers) as admin, Consumer(servers) as consumer:
        [description] = admin.describe_topics([topic])
        partitions = [TopicPartition(topic, each.partition) for each in description.partitions]
        starts, ends = (admin.list_offsets(dict.fromkeys(partitions, end)) for end in ("earliest", "latest"))
        offsets = {each.partition: list(range(starts[each].offset or 0, ends[each].offset or 0)) for each in partitions}
        found: dict[int, list[Message]] = {each.partition: [] for each in partitions}
        consumer.assign(dict.fromkeys(partitions, "earliest"))
        for message in consumer.messages(max_messages=sum(map(len, offsets.values())), timeout=60):
            found[message.partition].append(message)
    assert {partition: [message.offset for message in messages] for partition, messages in found.items()} == offsets
    return found


def all_messages(servers: str, topic: str) -> list[Message]:
    """The same, partition by partition."""
    return [message for _, messages in sorted(messages_of(servers, topic).items()) for message in messages]
