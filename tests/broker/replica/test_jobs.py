"""Jobs: who asks again waits for the same work, a partition's run in order, several partitions' side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from broker.replica.jobs import Jobs
from kafkalog.errors import BrokerStopping, DiskFull, OutOfThreads
from tests.threads import NoThreads

SECONDS = 30


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs(2, "job", lambda: BrokerStopping(broker_id=7))
    yield made
    made.stop()


def gated(done: list[str], name: str) -> tuple[threading.Event, threading.Event, Callable[[], str]]:
    """A piece of work that says when it begins, and ends once it may."""
    begun, may_end = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert may_end.wait(SECONDS)
        done.append(name)
        return name

    return begun, may_end, work


def test_who_asks_again_meanwhile_waits_for_the_same_work_and_later_for_another(jobs: Jobs) -> None:
    done: list[str] = []
    begun, may_end, work = gated(done, "a")
    job = jobs.ask("p", "key", work)
    assert begun.wait(SECONDS)
    assert not job.wait(0)
    assert jobs.ask("p", "key", work) is job
    may_end.set()
    assert job.wait(SECONDS)
    assert (job.result(), done) == ("a", ["a"])
    again = jobs.ask("p", "key", work)
    assert again is not job
    assert again.wait(SECONDS)
    assert done == ["a", "a"]


def test_a_job_for_which_no_thread_can_be_started_is_refused_and_asked_for_again(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    machine = NoThreads(monkeypatch, lambda name: name.startswith("job"))
    with pytest.raises(OutOfThreads):
        jobs.ask("p", "key", lambda: done.append("refused"))
    assert not jobs.is_busy("p")
    machine.on = False
    assert jobs.ask("p", "key", lambda: done.append("done")).wait(SECONDS)
    assert done == ["done"]


def test_jobs_of_a_partition_run_in_order_and_delay_no_other(jobs: Jobs) -> None:
    done: list[str] = []
    begun, may_end, work = gated(done, "first")
    first = jobs.ask("p", 1, work)
    assert begun.wait(SECONDS)
    second = jobs.ask("p", 2, lambda: done.append("second"))
    assert jobs.ask("q", 1, lambda: done.append("other")).wait(SECONDS)
    assert first.begun
    assert not second.begun
    may_end.set()
    assert second.wait(SECONDS)
    assert done == ["other", "first", "second"]


def test_what_a_job_raises_is_raised_to_who_waits_and_the_next_job_runs(jobs: Jobs) -> None:
    def fails() -> None:
        raise DiskFull(directory="/data")

    job = jobs.ask("p", 1, fails)
    assert job.wait(SECONDS)
    with pytest.raises(DiskFull):
        job.result()
    assert jobs.ask("p", 1, lambda: None).wait(SECONDS)


def test_a_stop_gives_up_what_waits_and_takes_no_more(jobs: Jobs) -> None:
    done: list[str] = []
    begun, may_end, work = gated(done, "running")
    running = jobs.ask("p", 1, work)
    assert begun.wait(SECONDS)
    waiting = jobs.ask("p", 2, lambda: done.append("never"))
    jobs.stop()
    assert waiting.wait(0)
    for late in (waiting.result, lambda: jobs.ask("q", 1, lambda: None)):
        with pytest.raises(BrokerStopping):
            late()
    may_end.set()
    assert running.wait(SECONDS)
    assert done == ["running"]


def test_a_batch_that_was_given_up_is_not_done(jobs: Jobs) -> None:
    gates = [gated([], name) for name in "ab"]
    for number, (begun, _, work) in enumerate(gates):  # all threads are taken
        jobs.ask(number, 1, work)
        assert begun.wait(SECONDS)
    done: list[str] = []
    waiting = jobs.ask("p", 1, lambda: done.append("never"))
    jobs.stop()
    assert waiting.wait(0)
    for _, may_end, _ in gates:
        may_end.set()
    jobs._threads.shutdown(wait=True)
    assert done == []
    with pytest.raises(BrokerStopping):
        waiting.result()


def test_who_asks_after_the_stop_is_answered_each_with_an_error_of_its_own(jobs: Jobs) -> None:
    jobs.stop()
    raised = []
    for _ in range(2):
        with pytest.raises(BrokerStopping) as told:
            jobs.ask("p", 1, lambda: None)
        raised.append(told.value)
    assert raised[0] is not raised[1]  # one that is raised again and again gathers tracebacks
