"""Handles missing records: fails or logs, as failOnDataLoss says. Every place that finds a loss calls this."""

from __future__ import annotations

from collections.abc import Container

from kafkalog.errors import DataLost, KafkalogError
from kafkalog.events import get_logger

log = get_logger(__name__)


class Losses:
    """Fails on a loss, or logs it once and continues.

    Args:
        fail: the option failOnDataLoss.
        accepted: losses that fail nothing, because an earlier look went on without these records.

    Attributes:
        gone_over: the losses that were found and did not fail the read.
    """

    def __init__(self, fail: bool, accepted: Container[str] = ()) -> None:
        self.fail = fail
        self.gone_over: set[str] = set()
        self._accepted = accepted
        self._told: set[str] = set()

    def found(self, reason: str, error: KafkalogError | None = None) -> None:
        """Raises the error, or DataLost, if losses are to fail the read."""
        if reason not in self._accepted:
            if self.fail:
                more = "set failOnDataLoss=false to continue with the records that are left"
                raise error or DataLost(reason=f"{reason}; {more}")
            if reason not in self._told:
                self._told.add(reason)
                log.warning("data_lost", reason=reason)
        self.gone_over.add(reason)
