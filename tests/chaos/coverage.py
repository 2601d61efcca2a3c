"""Which situations a run has reached, by what brokers logged and clients wrote. Seeds that never reach a situation show
nothing about it, so a run over several seeds names those that it requires. Pure.

A probe looks for an event in the brokers' logs. Those in `OF_REPLICATION` are of replication: no broker logs their
events while a partition has one copy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from tests.chaos.history import Operation

OF_LOGS = {
    "log recovered after a kill": r"\blog_recovered\b",
    "session lost": r"\bzookeeper_disconnected\b.*\bsession_lost=true",
    "batch applied by its leader": r"\btransaction_resolved\b.*\bdone=applied",
    "batch dropped by its leader": r"\btransaction_resolved\b.*\bdone=dropped",
    "claim lost": r"\bmember_lapsed\b",
    "segment rolled": r"\bsegment_rolled\b",
}
OF_REPLICATION = {
    "leader changed": r"\bleaders_elected\b",
    "in-sync set at min": r"\bin_sync_set_changed\b.*\bat_min=true",
    "follower cut its log": r"\blog_truncated\b",
    "duplicate after failover": r"\bduplicate_recognised\b.*\bearlier_epoch=true",
    "epoch without records": r"\bleader_epoch_begun\b.*\bprevious_is_empty=true",
}
OF_HISTORIES = (
    "send with an unknown outcome",
    "attempt dropped",
    "batch with an unknown outcome",
    "recorded by an earlier attempt",
)
PROBES = (*OF_LOGS, *OF_REPLICATION, *OF_HISTORIES)

REQUIRED = ("log recovered after a kill", "session lost", "segment rolled", "attempt dropped")
"""What some seeds together have to reach where each partition has one copy."""
REQUIRED_REPLICATED = (*REQUIRED, *OF_REPLICATION)


def of_logs(lines: Iterable[str]) -> Counter[str]:
    """How often each situation was reached, by the lines of brokers' logs."""
    patterns = {name: re.compile(pattern) for name, pattern in (OF_LOGS | OF_REPLICATION).items()}
    found: Counter[str] = Counter()
    for line in lines:
        found.update(name for name, pattern in patterns.items() if pattern.search(line))
    return found


def of_history(operations: Iterable[Operation]) -> Counter[str]:
    """The same, by what clients wrote."""
    found: Counter[str] = Counter()
    failed: set[str] = set()
    for operation in operations:
        match operation.what, operation.outcome:
            case "send", "info":
                found["send with an unknown outcome"] += 1
            case "commit", "fail":
                found["attempt dropped"] += 1
                failed.add(operation.run)
            case "commit", "info":
                found["batch with an unknown outcome"] += 1
            case "batch", "ok" if operation.run in failed:
                found["recorded by an earlier attempt"] += 1
    return found


def missing(reached: Counter[str], required: Iterable[str]) -> list[str]:
    """The required situations that were never reached. Raises ValueError if one has no probe."""
    wanted = list(required)
    if unknown := [name for name in wanted if name not in PROBES]:
        raise ValueError(f"there are no probes {', '.join(unknown)}; there are {', '.join(PROBES)}")
    return [name for name in wanted if not reached[name]]
