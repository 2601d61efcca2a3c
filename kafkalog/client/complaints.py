"""Warnings about repeated retries: one at the first failure, then one a minute while the failures last.

The retrying code calls `failed` after each failure. When it succeeds it calls nothing, or `ended` if its retries never
end. Knows no broker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from kafkalog.errors import (
    LEADER_CHANGES,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    OutOfOrderSequence,
    UnknownPartition,
)
from kafkalog.events import EventLogger

EVERY_SECONDS = 60.0
_QUIET_SECONDS = 5.0
"""A failure this long after the last one begins a new series, if its retries also end later. Time alone does not show
it: one try can take as long, as a connection to a broker that hangs does."""
_PASSING = (
    *LEADER_CHANGES,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    OutOfOrderSequence,
    UnknownPartition,
)
"""Failures that a change of leaders brings with it, or a new partition, which a member of a group is given before its
metadata has it; they are said only when they last."""
_PASSING_SECONDS = 2.0


class Complaint:
    """The warnings of one operation that is retried. Not thread-safe: one thread does the retries.

    Args:
        log: of the module that retries.
        event: the warning's name.
        clock: monotonic seconds.
        patience_s: failures are said only once they have lasted for so long.
    """

    __slots__ = ("_clock", "_event", "_last", "_log", "_patience_s", "_said", "_since", "_until")

    def __init__(
        self, log: EventLogger, event: str, clock: Callable[[], float] = time.monotonic, patience_s: float = 0.0
    ) -> None:
        self._patience_s = patience_s
        self._log = log
        self._event = event
        self._clock = clock
        self._since: float | None = None
        self._last = self._until = 0.0
        self._said: float | None = None

    def ended(self) -> None:
        """The failures have ended: the next one begins a new series."""
        self._since = None

    def failed(self, error: Exception, until: float, **facts: object) -> None:
        """Record a failure that is retried, and log a warning if one is due.

        Args:
            until: when the retries end, by the monotonic clock in seconds; infinite: never.
            **facts: logged too.
        """
        now = self._clock()
        if self._since is None or (now - self._last > _QUIET_SECONDS and until > self._until):
            self._since, self._said = now, None
        self._last, self._until = now, until
        if self._said is None:
            patience_s = max(self._patience_s, _PASSING_SECONDS if isinstance(error, _PASSING) else 0.0)
            if now - self._since < patience_s:
                return
        elif now - self._said < EVERY_SECONDS:
            return
        self._said = now
        self._log.warning(
            self._event,
            **facts,
            reason=str(error),
            failing_for_s=round(now - self._since),
            **({} if until == math.inf else {"given_up_in_s": max(0, round(until - now))}),
        )
