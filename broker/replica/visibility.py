"""Up to where readers may read a partition. Knows offsets; no bytes, no files.

The readable end is the log's end or, with flush.visibility=flushed, what is flushed (the paper's rule, section 3.1).
Before both it is where the first batch of a transaction begins that is not whole yet: such a batch is hidden, with
whatever others append behind it, so that what readers see is always a beginning of the log. The readable end never goes
back: a reader whose end went back would take its range for lost.

Threads: `_lock` guards all that changes; it comes after the log's. `look` takes no lock: it takes the log's view while
the state stands still. A batch is hidden before it is appended, and shown after all of it is there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from broker.config import TopicSettings
from broker.storage.log import Log
from broker.storage.reader import View

TransactionalBatch = tuple[int, int]
"""Producer id and batch id of a transaction's batch."""


class _State(NamedTuple):
    """All that `look` needs beside a view. `shown_offset`: with flush.visibility=flushed, what readers were shown
    before that was set; `hidden_from`: where the first hidden batch begins."""

    when_flushed: bool
    shown_offset: int
    hidden_from: int | None


class Visibility:
    """What of a log readers see. Thread-safe."""

    def __init__(self, log: Log, settings: TopicSettings) -> None:
        self._log = log
        self._lock = threading.Lock()  # guards all below, but for reads of _state
        self._hidden: dict[TransactionalBatch, int] = {}  # where they begin
        self._whole: dict[TransactionalBatch, int] = {}  # of the hidden ones: where they end, to be flushed up to there
        self._state = _State(settings.flush_visibility == "flushed", 0, None)

    def look(self) -> tuple[View, int]:
        """What is there now, and the offset up to which readers may read. Both are of one moment: a view from amid a
        batch would end there for a state in which the batch is whole, and shown."""
        while True:
            state = self._state
            view = self._log.reader.view
            if self._state is state:
                return view, _readable_end(view, state)

    def update_settings(self, settings: TopicSettings) -> None:
        """Use other topic settings from now on. What readers were shown they keep."""
        with self._log.no_appends(), self._lock:
            shown_offset = _readable_end(self._log.view, self._state)
            self._state = self._state._replace(
                when_flushed=settings.flush_visibility == "flushed", shown_offset=shown_offset
            )

    def truncated(self, end_offset: int) -> None:
        """The log was cut to an offset: what readers were shown behind it is gone, and so is what was hidden there. A
        batch of which a part is left is not whole any more."""
        with self._lock:
            self._hidden = {batch: start for batch, start in self._hidden.items() if start < end_offset}
            self._whole = {batch: end for batch, end in self._whole.items() if end <= end_offset}
            self._state = self._state._replace(shown_offset=min(self._state.shown_offset, end_offset))
            self._publish()

    def hide(self, batch: TransactionalBatch, start_offset: int | None = None) -> None:
        """Show readers nothing from where a batch begins, until it is shown. A hidden one stays as it is.

        Args:
            start_offset: where it begins; None: it will be appended, and nothing of it is there.
        """
        with self._log.no_appends() as end_offset, self._lock:
            self._hidden.setdefault(batch, end_offset if start_offset is None else start_offset)
            self._publish()

    def show(self, batch: TransactionalBatch) -> None:
        """Show readers what was hidden of a batch: there comes no more."""
        with self._lock:
            self._show([batch])

    def show_once_flushed(self, batch: TransactionalBatch, end_offset: int) -> None:
        """Show a batch that is whole as soon as everything before an offset is flushed: now, or by the flush that gets
        there, which is asked for."""
        with self._lock:
            if self._log.flushed_offset >= end_offset:
                self._show([batch])
                return
            if batch in self._hidden:
                self._whole[batch] = end_offset
        self._log.request_flush()

    def flushed(self) -> None:
        """A flush of the log is over: show what is whole."""
        if self._whole:
            with self._lock:
                flushed_offset = self._log.flushed_offset
                self._show([batch for batch, end_offset in self._whole.items() if end_offset <= flushed_offset])

    def _show(self, batches: Iterable[TransactionalBatch]) -> None:
        for batch in batches:
            self._hidden.pop(batch, None)
            self._whole.pop(batch, None)
        self._publish()

    def _publish(self) -> None:
        self._state = self._state._replace(hidden_from=min(self._hidden.values(), default=None))


def _readable_end(view: View, state: _State) -> int:
    when_flushed, shown_offset, hidden_from = state
    end = view.end_offset
    if when_flushed:
        end = max(view.flushed_offset, min(shown_offset, end))
    if hidden_from is not None and hidden_from < end:
        return max(view.start_offset, hidden_from)
    return end
