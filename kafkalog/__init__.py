"""A partitioned, append-only log for Spark: the client library, and what it shares with the broker.

    from kafkalog import Admin, Consumer, Message, Producer, TopicPartition

Each name is loaded on first use: `import kafkalog` alone costs nothing. `kafkalog.aio` has the client for asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafkalog import aio as aio
    from kafkalog.client.admin import Admin, AtTimestamp
    from kafkalog.client.consumer.consumer import Consumer
    from kafkalog.client.producer.producer import Producer
    from kafkalog.errors import KafkalogError
    from kafkalog.records import Message, Messages, RecordMetadata, TopicPartition

    __version__: str

_HOMES = {
    "Admin": "kafkalog.client.admin",
    "AtTimestamp": "kafkalog.client.admin",
    "Consumer": "kafkalog.client.consumer.consumer",
    "KafkalogError": "kafkalog.errors",
    "Message": "kafkalog.records",
    "Messages": "kafkalog.records",
    "Producer": "kafkalog.client.producer.producer",
    "RecordMetadata": "kafkalog.records",
    "TopicPartition": "kafkalog.records",
}

__all__ = [
    "Admin",
    "AtTimestamp",
    "Consumer",
    "KafkalogError",
    "Message",
    "Messages",
    "Producer",
    "RecordMetadata",
    "TopicPartition",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        try:
            value: Any = metadata.version("pyspark-kafkalog")
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            value = "0+unknown"
    elif name == "aio":
        value = importlib.import_module("kafkalog.aio")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'kafkalog' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "aio"})
