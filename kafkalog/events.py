"""Logging: an event's name and its values (`segment_rolled partition=t-0 base_offset=500`), over standard `logging`.

A logger is a standard one underneath, so handlers, levels and files are the user's configuration; nothing is
configured at import. `log_to_stderr` is for programs of our own (broker, command line). Knows no event.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"


class EventLogger:
    """Events of one module. Values are rendered only when the event is enabled."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **values: Any) -> None:
        self._emit(logging.DEBUG, event, values)

    def info(self, event: str, **values: Any) -> None:
        self._emit(logging.INFO, event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._emit(logging.WARNING, event, values)

    def error(self, event: str, **values: Any) -> None:
        self._emit(logging.ERROR, event, values)

    def exception(self, event: str, **values: Any) -> None:
        """An error event with the traceback of the exception that is being handled."""
        self._emit(logging.ERROR, event, values, exc_info=True)

    def _emit(self, level: int, event: str, values: dict[str, Any], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", _render(event, values), exc_info=exc_info, stacklevel=3)


def _render(event: str, values: dict[str, Any]) -> str:
    if not values:
        return event
    try:
        return f"{event} {_renderer()(None, event, values)}"
    except (OSError, ImportError):  # no file descriptor is left for the import; this may be the very event to log
        return f"{event} {values}"


@functools.cache
def _renderer() -> Callable[[Any, str, dict[str, Any]], str]:
    """key=value rendering with quoting; imported at the first event, for structlog takes 0.2 s to import."""
    from structlog.processors import LogfmtRenderer  # ImportError: another thread's import has failed midway

    return LogfmtRenderer(bool_as_flag=False)


def get_logger(name: str) -> EventLogger:
    """The logger of a module: `log = get_logger(__name__)`."""
    return EventLogger(name)


def log_to_stderr(level: str = "info") -> None:
    """Send events of at least a level to stderr, and only warnings of the libraries that kafkalog uses.

    Args:
        level: debug, info, warning or error.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=_FORMAT, force=True)
    for ours in ("kafkalog", "broker", "pyspark_kafkalog"):
        logging.getLogger(ours).setLevel(level.upper())
    _renderer()
    # Kazoo warns of every failed connection attempt; zk/session.py logs this once.
    logging.getLogger("kazoo").setLevel(logging.ERROR)
