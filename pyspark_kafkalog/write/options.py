"""The options of a write as one value, and the rules between them. Text to typed values; pure.

The options themselves are rows of the table in `options.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kafkalog.errors import InvalidArgument
from pyspark_kafkalog.options import (
    AT_LEAST_ONCE,
    EXACTLY_ONCE,
    WRITE,
    bootstrap_servers,
    client_settings,
    defaults,
    option_values,
)


class TxnVersion(NamedTuple):
    """The number of a write of an application. For the versions that are skipped, see
    `kafkalog/client/transaction/coordinator.py:CommitBatch.skip_if_recorded`."""

    app_id: str
    version: int


@dataclass(frozen=True)
class SinkOptions:
    """The parsed options of a write. `topic` is None if the rows have topics; `txn` is None without a version;
    `checkpoint`, the query's, is None without its option."""

    bootstrap_servers: str
    client: dict[str, str]
    topic: str | None
    exactly_once: bool
    txn: TxnVersion | None
    checkpoint: str | None


def parse_sink(options: Mapping[str, str], *, stream: bool = False) -> SinkOptions:
    """The options of a write. Raises InvalidArgument."""
    from kafkalog.client.config import ProducerSettings, parse_producer

    given = option_values(options, WRITE)
    values = defaults(WRITE) | given
    client = client_settings(options, ProducerSettings)
    parse_producer(client)
    topic = values["topic"]
    delivery = values["delivery"]
    app_id, version = values["txnAppId"], values["txnVersion"]
    if stream and not (app_id is None and version is None):
        raise InvalidArgument(
            reason="the options txnAppId and txnVersion are for batch writes, such as those in foreachBatch; Spark "
            "itself numbers a stream's batches"
        )
    if (app_id is None) != (version is None):
        present, missing = ("txnVersion", "txnAppId") if app_id is None else ("txnAppId", "txnVersion")
        raise InvalidArgument(reason=f"the option {present} requires {missing}: give both, or neither")
    if app_id is not None and delivery == AT_LEAST_ONCE:
        raise InvalidArgument(reason=f"txnAppId and txnVersion require delivery={EXACTLY_ONCE}, not {AT_LEAST_ONCE}")
    txn = None if app_id is None or version is None else TxnVersion(app_id, version)
    return SinkOptions(
        bootstrap_servers=bootstrap_servers(given),
        client=client,
        topic=topic,
        exactly_once=delivery == EXACTLY_ONCE,
        txn=txn,
        checkpoint=values["checkpointLocation"],
    )
