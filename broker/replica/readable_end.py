"""Up to where readers may read a replica.

The readable end is the high watermark or, with flush.visibility=flushed, the end of the flushed records (the paper's
rule, section 3.1) if that is before it. In both cases it is at most the start of the first hidden batch (`applier.py`).
It does not go back while the replica leads, because a reader would then treat its range as lost.
"""

from __future__ import annotations

from typing import NamedTuple

from broker.config import TopicSettings
from broker.replica.applier import Applier
from broker.replica.role import Role
from broker.storage.reader import Reader, View


class _Rule(NamedTuple):
    """Whether readers see only what is flushed. `shown_offset`: records before it were readable when the rule was set,
    and stay readable."""

    flushed_only: bool
    shown_offset: int


class ReadableEnd:
    """The readable end of a replica. It is read without a lock."""

    def __init__(self, reader: Reader, applier: Applier, role: Role, settings: TopicSettings) -> None:
        self._reader = reader
        self._applier = applier
        self._role = role
        self._rule = _Rule(settings.flush_visibility == "flushed", 0)

    def look(self) -> tuple[View, int]:
        """The current view and the readable end, both of the same moment. A view taken amid a hidden batch would end
        within that batch if the batch was shown meanwhile."""
        while True:
            rule, hidden = self._rule, self._applier.hidden
            view = self._reader.view
            if self._applier.hidden is hidden and self._rule is rule:
                break
        end = view.end_offset
        if rule.flushed_only:
            end = max(view.flushed_offset, min(rule.shown_offset, end))
        end = min(end, self._role.readable_limit)
        from_offset = hidden.from_offset
        return view, end if from_offset is None or end <= from_offset else max(view.start_offset, from_offset)

    def waits_for_flush_to(self, offset: int) -> bool:
        """Whether readers do not see all before an offset because it is not flushed here."""
        rule = self._rule
        return rule.flushed_only and max(self._reader.view.flushed_offset, rule.shown_offset) < offset

    def update_settings(self, settings: TopicSettings) -> None:
        """Use other settings from now on. Readers still see what they could see before. The log takes no appends
        meanwhile, and the applier makes no changes."""
        self._rule = _Rule(settings.flush_visibility == "flushed", self.look()[1])

    def cut_to(self, end_offset: int) -> None:
        """The log was cut: what comes after this offset was not readable before. The applier makes no changes
        meanwhile."""
        self._rule = self._rule._replace(shown_offset=min(self._rule.shown_offset, end_offset))
