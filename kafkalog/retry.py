"""Trying again: how long to pause after each failure, and when to give up. What is worth it is a `RetriableError`.

Pure: time is passed in, and whoever tries again does the waiting. Knows no broker.
"""

from __future__ import annotations

import math


class Backoff:
    """The pauses between tries: each twice as long as the one before, up to a longest.

    Attributes:
        pause: seconds, of the next one.
    """

    __slots__ = ("_first", "_longest", "pause")

    def __init__(self, first: float, longest: float) -> None:
        self.pause = self._first = first
        self._longest = longest

    def next(self) -> float:
        """The pause to make now."""
        pause = self.pause
        self.pause = min(pause * 2, self._longest)
        return pause

    def reset(self) -> None:
        """It succeeded: the next pause is the first."""
        self.pause = self._first


class Retry:
    """One thing that is tried until it succeeds, or until it failed for too long.

    Args:
        limit: seconds that failures in a row may go on.
        since: when they began; None: with the first one.
    """

    __slots__ = ("backoff", "limit", "since")

    def __init__(self, backoff: Backoff, limit: float, since: float | None = None) -> None:
        self.backoff = backoff
        self.limit = limit
        self.since = since

    @property
    def until(self) -> float:
        """When it is given up, at the latest; infinite while nothing has failed."""
        return math.inf if self.since is None else self.since + self.limit

    def failed(self, now: float) -> float | None:
        """The pause to make before the next try, in seconds; None: the time is over. The last try is made when it ends,
        however long a pause would be due."""
        if self.since is None:
            self.since = now
        left = self.until - now
        return min(self.backoff.next(), left) if left > 0 else None

    def succeeded(self) -> None:
        """Failures from now on are new ones."""
        self.since = None
        self.backoff.reset()
