"""Failures in following one topic or broker, with their reasons: each affects that one alone, is logged once, and is
tried again every second. Knows no topics: things are named by the paths of their znodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kafkalog.clock import Clock
from kafkalog.errors import KafkalogError, ZooKeeperUnreachable
from kafkalog.events import get_logger

log = get_logger(__name__)

RETRY_SECONDS = 1.0


class Undone:
    """Used by one thread.

    Attributes:
        reasons: by path, the reason of the last failure.
        retry_at: when the failures are retried, by the monotonic clock.
    """

    def __init__(self, clock: Clock) -> None:
        self.reasons: dict[str, str] = {}
        self.retry_at = 0.0
        self._clock = clock

    @contextmanager
    def sparing_others(self, path: str, is_last: bool = True) -> Iterator[None]:
        """A failure in the block is logged and retried later, and the caller continues; only ZooKeeperUnreachable is
        raised. `is_last`: if the block succeeds, all work for the path is done."""
        try:
            yield
        except ZooKeeperUnreachable:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if self.reasons.get(path) != why:  # logged once, however often it is tried
                if isinstance(error, KafkalogError):
                    log.error("not_followed", path=path, reason=str(error))
                else:
                    log.exception("not_followed", path=path)
            self.reasons[path] = why
            self.retry_later()
        else:
            if is_last:
                self.reasons.pop(path, None)

    def retry_later(self) -> None:
        self.retry_at = self._clock.monotonic() + RETRY_SECONDS
