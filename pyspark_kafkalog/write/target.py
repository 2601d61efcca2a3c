"""What brokers refuse of a write, found on the driver before the first task: Spark would run the tasks of a write that
cannot succeed as often as its settings say, and log each failure at length."""

from __future__ import annotations

from contextlib import suppress

from kafkalog.errors import RetriableError
from pyspark_kafkalog.connections import cluster_of
from pyspark_kafkalog.write.options import SinkOptions


def check_target(options: SinkOptions) -> None:
    """Check that the option topic names a topic. Topics in a column are known only to the tasks.

    An unreachable broker is left to the tasks, which retry. A stream's writers are made again for each micro-batch:
    this process's cached topics are used. Raises UnknownTopic.
    """
    from kafkalog.client.config import parse_producer

    if options.topic is None:
        return
    cluster = cluster_of(options.bootstrap_servers, parse_producer(options.client))
    with suppress(RetriableError):
        if cluster.fresh_topic(options.topic) is None:
            cluster.describe(patient=False)  # a new topic may be known to only one of the brokers: all are asked
        cluster.topic(options.topic, patient=False)
