"""The Python client for asyncio: `Consumer` and `Producer`, a thin layer over those of `kafkalog`.

from kafkalog import aio
"""

from kafkalog.aio.consumer import Consumer
from kafkalog.aio.producer import Delivery, Producer

__all__ = ["Consumer", "Delivery", "Producer"]
