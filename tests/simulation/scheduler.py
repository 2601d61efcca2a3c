"""Simulated time and simulated threads: one event heap, by which one thing after the other runs.

A `Fiber` is a thread of the program under test. It is a real thread, but only one runs at a time: it has the baton from
when its event is due until it waits. Everything else follows from the seed: in which order those run that could run at
the same time, and at which locks one gives way to others. `threads()` puts simulated locks, conditions, events and
queues in the place of the real ones in the modules of broker and kafkalog.

A fiber belongs to a process. A process that is killed or frozen runs none of its fibers.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import queue
import random
import secrets
import sys
import threading
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kafkalog.clock import Clock

Call = Callable[[], object]
_REAL = ("kafkalog.client", "kafkalog.aio", "broker.announce")  # other tests may have left some that run
_START_US = 1_700_000_000_000_000


class Killed(BaseException):
    """Raised in the fibers of a process that is killed, where they wait."""


class Process:
    """What fibers belong to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.frozen_until = 0.0
        self.fibers: dict[int, Fiber] = {}


class Fiber:
    """A simulated thread. It starts when its first event is due.

    Attributes:
        is_done: it has ended.
        failure: the exception that ended it, which the scheduler raises.
    """

    def __init__(self, scheduler: Scheduler, process: Process, name: str, target: Call) -> None:
        self.scheduler = scheduler
        self.process = process
        self.number = next(scheduler.fiber_numbers)
        self.name = f"{process.name}/{name}"
        self.is_done = False
        self.failure: BaseException | None = None
        self.chance = random.Random(f"{scheduler.seed} {self.number}")
        self._target = target
        self._baton = _thread.allocate_lock()
        self._baton.acquire()
        self._is_started = False
        self._wait = 0  # number of the current wait; an event of an earlier one does nothing
        self._is_waiting = True
        self._joining: list[Fiber] = []
        process.fibers[self.number] = self
        self.wake()

    def wake(self, after_seconds: float = 0.0) -> None:
        """Let it go on, if it waits. A wait goes on at its first wake."""
        if self._is_waiting:
            wait = self._wait
            self.scheduler.after(after_seconds + self.chance.random() * 1e-5, lambda: self._go_on(wait), self.name)

    def _go_on(self, wait: int) -> None:
        process = self.process
        if self.is_done or wait != self._wait or not self._is_waiting or process.is_dead:
            return
        if process.frozen_until > self.scheduler.now:
            self.scheduler.after(process.frozen_until - self.scheduler.now, lambda: self._go_on(wait), self.name)
            return
        self._run()

    def _run(self) -> None:
        """By the scheduler: run until it waits or ends."""
        self._is_waiting = False
        self._wait += 1
        scheduler = self.scheduler
        scheduler.current = self
        if self._is_started:
            self._baton.release()
        else:
            self._is_started = True
            _thread.start_new_thread(self._main, ())
        scheduler.baton.acquire()
        scheduler.current = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def _main(self) -> None:
        try:
            if not self.process.is_dead:
                self._target()
        except Killed:
            pass
        except BaseException as error:
            self.failure = error
        self.is_done = True
        del self.process.fibers[self.number]
        for other in self._joining:
            other.wake()
        self.scheduler.baton.release()

    def suspend(self, seconds: float | None = None) -> None:
        """Within it: wait for a `wake`, at most so long. Raises Killed."""
        if self.process.is_dead:
            raise Killed
        self._is_waiting = True
        if seconds is not None:
            wait = self._wait
            self.scheduler.after(max(seconds, 0.0), lambda: self._go_on(wait), self.name)
        self.scheduler.baton.release()
        self._baton.acquire()
        if self.process.is_dead:
            raise Killed

    def join(self) -> None:
        """Wait for its end, within another fiber."""
        me = self.scheduler.running
        while not self.is_done:
            self._joining.append(me)
            me.suspend()


class Scheduler:
    """The heap of events, and the clock.

    Attributes:
        now: seconds since the beginning.
        events: how many were due so far.
        trace: a checksum of which were due when.
        switch_chance: of giving way to others where a lock is taken.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.events = 0
        self.trace = 0
        self.switch_chance = 0.0
        self.fiber_numbers = itertools.count()
        self.current: Fiber | None = None
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.clock = _Clock(self)
        self._heap: list[tuple[float, int, Call, str]] = []
        self._event_numbers = itertools.count()
        self._processes: list[Process] = []

    def process(self, name: str) -> Process:
        made = Process(name)
        self._processes.append(made)
        return made

    def after(self, seconds: float, call: Call, label: str = "") -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._event_numbers), call, label))

    def spawn(self, process: Process, name: str, target: Call) -> Fiber:
        return Fiber(self, process, name, target)

    @property
    def running(self) -> Fiber:
        assert self.current is not None, "only a fiber can wait"
        return self.current

    def sleep(self, seconds: float) -> None:
        """Within a fiber."""
        fiber = self.running
        until = self.now + seconds
        while self.now < until:
            fiber.suspend(until - self.now)

    def run_until(self, is_over: Callable[[], bool], seconds: float) -> bool:
        """Run events until something holds; returns False if so many seconds passed before."""
        end = self.now + seconds
        while not is_over():
            if not self._heap or self._heap[0][0] > end:
                self.now = end
                return is_over()
            at, _, call, label = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            self.events += 1
            self.trace = zlib.crc32(f"{at:.7f} {label}".encode(), self.trace)
            call()
        return True

    def kill(self, process: Process) -> None:
        """End a process at once, between two events: its fibers end where they wait."""
        process.is_dead = True
        while process.fibers:
            next(iter(process.fibers.values()))._run()

    def close(self) -> None:
        """End all fibers."""
        for process in self._processes:
            self.kill(process)


class _Clock(Clock):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def now_us(self) -> int:
        return _START_US + int(self._scheduler.now * 1_000_000)

    def monotonic(self) -> float:
        return self._scheduler.now


# --- what threads use ------------------------------------------------------------------------------------------------


class Lock:
    """`threading.Lock`, and `threading.RLock`."""

    def __init__(self, scheduler: Scheduler, *, is_reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self._is_reentrant = is_reentrant
        self._owner: Fiber | None = None
        self._count = 0
        self._waiting: deque[Fiber] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        fiber = scheduler.current
        if self._count and self._is_reentrant and self._owner is fiber:
            self._count += 1
            return True
        if fiber is not None and blocking and scheduler.switch_chance and not fiber.process.is_dead:
            self._give_way(fiber)
        until = scheduler.now + timeout
        while self._count:
            if not blocking or (timeout >= 0 and scheduler.now >= until):
                return False
            me = scheduler.running
            self._waiting.append(me)
            me.suspend(until - scheduler.now if timeout >= 0 else None)
            if me in self._waiting:
                self._waiting.remove(me)
        self._owner, self._count = fiber, 1
        return True

    def _give_way(self, fiber: Fiber) -> None:
        if fiber.chance.random() < self._scheduler.switch_chance:
            self._scheduler.sleep(fiber.chance.random() * 1e-3)

    def release(self) -> None:
        if self._owner is not self._scheduler.current and self._scheduler.current is not None:
            assert self._scheduler.current.process.is_dead  # it was killed while it waited with the lock released
            return
        self._count -= 1
        if not self._count:
            self._owner = None
            while self._waiting:
                fiber = self._waiting.popleft()
                if not fiber.is_done:
                    fiber.wake()
                    break

    def locked(self) -> bool:
        return self._count > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class Condition:
    """`threading.Condition`."""

    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or Lock(scheduler, is_reentrant=True)
        self._waiting: list[Fiber] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        fiber = self._scheduler.running
        assert self._lock._owner is fiber
        count, self._lock._count = self._lock._count, 1
        self._lock.release()
        self._waiting.append(fiber)
        fiber.suspend(timeout)
        is_notified = fiber not in self._waiting
        if not is_notified:
            self._waiting.remove(fiber)
        self._lock.acquire()
        self._lock._count = count
        return is_notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else self._scheduler.now + timeout
        while not (found := predicate()):
            left = None if until is None else until - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for fiber in waiting:
            fiber.wake()

    def notify(self, n: int = 1) -> None:
        waiting, self._waiting = self._waiting[:n], self._waiting[n:]
        for fiber in waiting:
            fiber.wake()


class Event:
    """`threading.Event`. `set` may also be called by an event of the heap."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiting: list[Fiber] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for fiber in waiting:
            fiber.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else self._scheduler.now + timeout
        while not self._is_set:
            left = None if until is None else until - self._scheduler.now
            if left is not None and left <= 0:
                break
            fiber = self._scheduler.running
            self._waiting.append(fiber)
            fiber.suspend(left)
            if fiber in self._waiting:
                self._waiting.remove(fiber)
        return self._is_set


class Queue:
    """`queue.SimpleQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._items: deque[Any] = deque()
        self._scheduler = scheduler
        self._waiting: deque[Fiber] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._waiting.popleft().wake()

    def get(self) -> Any:
        while not self._items:
            fiber = self._scheduler.running
            self._waiting.append(fiber)
            fiber.suspend()
        return self._items.popleft()


class _Thread:
    """`threading.Thread`, in the process of the fiber that makes it."""

    def __init__(self, scheduler: Scheduler, target: Call, name: str, args: tuple[Any, ...] = ()) -> None:
        self._scheduler = scheduler
        self._target = target
        self._args = args
        self.name = name
        self._process = scheduler.running.process
        self._fiber: Fiber | None = None

    def start(self) -> None:
        self._fiber = self._scheduler.spawn(self._process, self.name, lambda: self._target(*self._args))

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.is_done

    def join(self, timeout: float | None = None) -> None:
        if self._fiber is not None:
            self._fiber.join()


@contextmanager
def threads(scheduler: Scheduler) -> Iterator[None]:
    """Within the `with` block the modules of broker and kafkalog, but for some, use simulated threads, and ids that
    follow from the seed. What they make must be used within the block."""
    simulated = SimpleNamespace(
        Lock=lambda: Lock(scheduler),
        RLock=lambda: Lock(scheduler, is_reentrant=True),
        Condition=lambda lock=None: Condition(scheduler, lock),
        Event=lambda: Event(scheduler),
        Thread=lambda target, name="", args=(), daemon=True: _Thread(scheduler, target, name, args),
        local=threading.local,
    )
    queues = SimpleNamespace(SimpleQueue=lambda: Queue(scheduler))
    chance = random.Random(scheduler.seed)

    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=chance.getrandbits(128), version=4)

    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith(("broker.", "kafkalog.")) and not name.startswith(_REAL):
                for attribute, real, ours in (("threading", threading, simulated), ("queue", queue, queues)):
                    if getattr(module, attribute, None) is real:
                        patches.enter_context(mock.patch.object(module, attribute, ours))
        patches.enter_context(mock.patch.object(uuid, "uuid4", uuid4))
        patches.enter_context(mock.patch.object(secrets, "randbits", chance.getrandbits))
        yield
