import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.states import KazooState as KazooState
from kazoo.retry import KazooRetry

class KazooClient:
    _session_timeout: int
    chroot: str
    handler: SequentialThreadingHandler
    hosts: list[tuple[str, int]]
    logger: logging.Logger
    _conn_retry: KazooRetry
    _connection: ConnectionHandler
    _live: threading.Event
    _pending: deque[tuple[Any, Any, int]]
    _queue: deque[tuple[Any, Any]]
    def __init__(
        self,
        hosts: str = ...,
        timeout: float = ...,
        client_id: tuple[int, bytes] | None = None,
        *,
        connection_retry: KazooRetry | None = None,
    ) -> None: ...
    @property
    def client_id(self) -> tuple[int, bytes] | None: ...
    @property
    def connected(self) -> bool: ...
    def add_listener(self, listener: Callable[[str], None]) -> None: ...
    def remove_listener(self, listener: Callable[[str], None]) -> None: ...
    def start(self, timeout: float = 15) -> None: ...
    def start_async(self) -> object: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def delete(self, path: str, version: int = -1, recursive: bool = False) -> bool: ...
    def _notify_pending(self, state: str) -> None: ...
