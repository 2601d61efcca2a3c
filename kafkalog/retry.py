"""Retries: how long to pause after each failure, and when to give up. Errors worth a retry are `RetriableError`s.

Pure: time is passed in, and the caller waits. Knows no broker.
"""

from __future__ import annotations

import math


class Backoff:
    """The pauses between tries: each twice as long as the one before, up to a maximum.

    Attributes:
        pause: the next pause, in seconds.
    """

    __slots__ = ("_first", "_longest", "pause")

    def __init__(self, first: float, longest: float) -> None:
        self.pause = self._first = first
        self._longest = longest

    def next(self, longest: float = math.inf) -> float:
        """Return the pause to make now, and double the next one.

        Args:
            longest: of this pause, in seconds; the first of all pauses is not shortened by it.
        """
        pause = self.pause
        self.pause = min(pause * 2, self._longest)
        return min(pause, max(longest, self._first))

    def reset(self) -> None:
        """Record a success: the next pause is the shortest."""
        self.pause = self._first


class Retry:
    """One operation that is tried until it succeeds, or until it has failed for too long.

    Args:
        limit: seconds that failures in a row may last.
        since: when they began; None: with the first failure.
    """

    __slots__ = ("backoff", "limit", "since")

    def __init__(self, backoff: Backoff, limit: float, since: float | None = None) -> None:
        self.backoff = backoff
        self.limit = limit
        self.since = since

    @property
    def until(self) -> float:
        """The time of the last try; infinite while nothing has failed."""
        return math.inf if self.since is None else self.since + self.limit

    def failed(self, now: float, longest: float = math.inf) -> float | None:
        """The pause before the next try, in seconds; None: the time is over. The last try is made when the time ends,
        even if its pause would be longer. `longest`: see `Backoff.next`."""
        if self.since is None:
            self.since = now
        left = self.until - now
        return min(self.backoff.next(longest), left) if left > 0 else None

    def succeeded(self) -> None:
        """Record a success: the time of failures starts anew."""
        self.since = None
        self.backoff.reset()
