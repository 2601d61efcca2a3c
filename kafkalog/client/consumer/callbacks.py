"""The callbacks of a subscription: `on_assigned`, `on_revoked` and `on_lost`. They run in a thread that reads, as in
Kafka's clients, so that they may seek and commit; one at a time, in the order in which they became due."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from kafkalog.client.consumer.cursors import Lease
from kafkalog.errors import KafkalogError
from kafkalog.patterns import matcher
from kafkalog.records import TopicPartition

Callback = Callable[[Any, list[TopicPartition]], object]
"""(consumer, partitions); called in a thread that reads."""

_LOOK_SECONDS = 0.5


class Subscription(NamedTuple):
    """What a member subscribes to, and what it is told.

    Attributes:
        topics, pattern: names, or a regular expression that a whole name matches.
        on_assigned: called with partitions before they are read.
        on_revoked: called with partitions before they are released; their offsets may still be committed.
        on_lost: called with partitions that others may own already.
    """

    topics: tuple[str, ...] = ()
    pattern: str = ""
    on_assigned: Callback | None = None
    on_revoked: Callback | None = None
    on_lost: Callback | None = None

    def has(self, topic: str) -> bool:
        """Whether a topic of this name is subscribed to."""
        return topic in self.topics or bool(self.pattern and matcher(self.pattern)(topic))

    def __str__(self) -> str:
        return f"topics matching {self.pattern}" if self.pattern else ", ".join(self.topics)


class Call:
    """A callback that is due, until a lease has ended; None: whenever that is.

    Attributes:
        done: called after it; may be called twice, because an interrupt may end the first call.
        was_called: it was begun.
    """

    __slots__ = ("callback", "done", "lease", "partitions", "was_called")

    def __init__(
        self,
        callback: Callback,
        partitions: list[TopicPartition],
        done: Callable[[], object] = bool,
        lease: Lease | None = None,
    ) -> None:
        self.callback = callback
        self.partitions = partitions
        self.done = done
        self.lease = lease
        self.was_called = False


class InCallback(threading.local):
    """What the thread that asks has to do with callbacks of the consumer, of whichever subscription.

    Attributes:
        here: it runs one.
        behalf: the thread that runs one, and waits for a call that one makes in the thread that asks; -1: none does.
    """

    here = False
    behalf = -1

    def is_from_callback(self) -> bool:
        """Whether a callback asks: in the thread that runs it, or in one whose call it waits for."""
        return self.here or self.behalf != -1

    def waits_for_this(self, thread: int | None) -> bool:
        """Whether a thread is the one that asks, or cannot get on before that one's call returns."""
        return thread in (threading.get_ident(), self.behalf)


class Callbacks:
    """Those that are due.

    Args:
        lock: guards all below. Threads of the application take it as it is: an interrupt may leave a condition's
            `with` block without its release.
        changed: of that lock; notified when one has returned.
        consumer: gives what each is called with; None once that is collected.
        in_callback: of the consumer.
        wake: called when one is due, to end the waits of threads that read.
        is_ending: no more are begun; those that are left are called by `finish`.

    Attributes:
        called_with: the partitions with which the callback that runs now was called, by whichever call.
    """

    def __init__(
        self,
        lock: AbstractContextManager[bool],
        changed: threading.Condition,
        consumer: Callable[[], Any],
        in_callback: InCallback,
        wake: Callable[[], object],
        is_ending: Callable[[], bool],
    ) -> None:
        self._lock = lock
        self._changed = changed
        self._wake = wake
        self._consumer = consumer
        self._in_callback = in_callback
        self._is_ending = is_ending
        self._calls: list[Call] = []  # one at most is due at a time
        self._serving: object = None  # of the call that runs a callback
        self._server = -1  # the thread of that
        self._raised: weakref.ref[KafkalogError] | None = None
        self.called_with: frozenset[TopicPartition] = frozenset()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(
        self, callback: Callback, partitions: list[TopicPartition], done: Callable[[], object], lease: Lease | None
    ) -> None:
        """One more is due."""
        with self._lock:
            self._calls.append(Call(callback, partitions, done, lease))
        self._wake()

    def clear(self) -> None:
        """None is due any more."""
        self._calls.clear()

    def due(self) -> Call | None:
        """What a thread that reads is to run now."""
        if self._serving is not None or not self._calls or self._is_ending():
            return None
        call = self._calls[0]
        return call if call.lease is None or not call.lease.has_ended() else None

    def are_served_elsewhere(self) -> bool:
        """Whether another thread runs a callback."""
        return self._serving is not None and not self._in_callback.waits_for_this(self._server)

    def served(self) -> set[TopicPartition]:
        """What a callback is served for now: also before it, and until what comes after it has returned. Takes no lock:
        it is asked for with the fetcher's held."""
        first = self._calls[:1]
        return set(first[0].partitions) if first and self._serving is not None else set()

    def serve(self, check: Callable[[], object]) -> None:
        """Run those that are due, in this thread; before each `check`, with the lock held, may raise."""
        mine = object()
        while True:
            try:
                with self._lock:
                    check()
                    call = self.due()
                    if call is None:
                        return
                    self._serving, self._server = mine, threading.get_ident()
                self._serve(call)
            finally:
                if self._serving is mine:
                    self._serving, self._server = None, -1
                    with self._lock:
                        self._changed.notify_all()

    def _serve(self, call: Call) -> None:
        """Run a callback. If an interrupt ends what comes after it, the next thread that reads does that again."""
        try:
            self.run(call)
        finally:
            if call.was_called:
                call.done()
                with self._lock:
                    if call in self._calls:
                        self._calls.remove(call)

    def run(self, call: Call) -> None:
        """Run a callback in this thread, if it was not begun."""
        consumer, partitions, called_with = self._consumer(), list(call.partitions), frozenset(call.partitions)
        before = self._in_callback.here, self.called_with
        try:
            self._in_callback.here = True
            if not call.was_called:
                self.called_with = called_with
                call.was_called = True  # this may be a signal's handler above a thread that is about to call it
                call.callback(consumer, partitions)
        except KafkalogError as error:
            self._raised = weakref.ref(error)
            raise
        finally:
            self._in_callback.here, self.called_with = before

    def has_raised(self, error: BaseException) -> bool:
        """Whether an error is the last one of a callback, and not of reading."""
        return self._raised is not None and self._raised() is error

    def wait_served(self) -> None:
        """Wait until none is due, or until the end."""
        with self._changed:
            while self._calls and not self._is_ending():
                self._changed.wait(_LOOK_SECONDS)  # an interrupt may take the notice with it

    def wait_returned(self) -> None:
        """Wait until none runs, or until the end."""
        with self._changed:
            while self._serving is not None and not self._is_ending():
                self._changed.wait(_LOOK_SECONDS)

    def finish(self, callback: Callback | None) -> None:
        """Call those of this kind that were not begun, in this thread."""
        for call in list(self._calls):
            if call.callback is callback:
                self.run(call)
