"""Handles missing records: fails or logs, as failOnDataLoss says. Every place that finds a loss calls this."""

from __future__ import annotations

from kafkalog.errors import DataLost
from kafkalog.events import get_logger

log = get_logger(__name__)


class Losses:
    """Fails on a loss, or logs it once and continues.

    Args:
        fail: the option failOnDataLoss.
    """

    def __init__(self, fail: bool) -> None:
        self.fail = fail
        self._told: set[str] = set()

    def found(self, reason: str) -> None:
        """Raises DataLost, if losses are to fail the read."""
        if self.fail:
            raise DataLost(reason=f"{reason}; set failOnDataLoss=false to continue with the records that are left")
        if reason not in self._told:
            self._told.add(reason)
            log.warning("data_lost", reason=reason)
