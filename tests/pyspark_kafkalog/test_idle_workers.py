"""What a worker does with a socket that Spark has let go of, over real ones; with Spark's daemon: `test_daemon.py`."""

from __future__ import annotations

import gc
import socket
import struct
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from pyspark_kafkalog.idle_workers import end_silently, ending_silently

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends a reset


@pytest.fixture(autouse=True)
def nothing_stays_set_aside() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Spark's end of a TCP connection, and the worker's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        spark = socket.create_connection(listener.getsockname())
        worker, _ = listener.accept()
    with spark, worker:
        yield spark, worker


def test_a_worker_gets_its_task_whole_and_says_how_it_ended(pair: tuple[socket.socket, socket.socket]) -> None:
    spark, worker = pair
    spark.sendall(b"task")
    asked: list[tuple[bytes, bool]] = []

    def work(sock: socket.socket, authenticated: bool) -> int:
        asked.append((sock.recv(10), authenticated))
        return 7

    for authenticated in (True, False):
        spark.sendall(b"task")
        asked.clear()
        assert ending_silently(work)(worker, authenticated) == 7
        [(data, was_authenticated)] = asked
        assert data.startswith(b"task")
        assert was_authenticated is authenticated


def test_a_worker_without_a_further_task_does_nothing_at_all(pair: tuple[socket.socket, socket.socket]) -> None:
    spark, worker = pair
    spark.close()

    def work(sock: socket.socket, authenticated: bool) -> int:
        raise AssertionError("there is no task")

    assert ending_silently(work)(worker, True) == 1


def test_a_worker_that_was_let_go_of_by_a_reset_does_nothing_either(pair: tuple[socket.socket, socket.socket]) -> None:
    spark, worker = pair
    spark.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    spark.close()

    def work(sock: socket.socket, authenticated: bool) -> int:
        raise AssertionError("there is no task")

    assert ending_silently(work)(worker, True) == 1


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_worker_whose_reader_has_enough_ends_as_one_that_failed(
    pair: tuple[socket.socket, socket.socket], is_reset: bool
) -> None:
    """So that nobody uses it again: what is left of its answer is nowhere."""
    spark, worker = pair
    spark.sendall(b"task")

    def work(sock: socket.socket, authenticated: bool) -> int:
        sock.recv(10)
        if is_reset:
            spark.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        spark.close()
        if is_reset:
            sock.recv(10)
        while True:
            sock.sendall(bytes(1 << 16))

    assert ending_silently(work)(worker, True) == 1


def test_what_a_worker_has_after_its_first_task_is_set_aside_once(pair: tuple[socket.socket, socket.socket]) -> None:
    spark, worker = pair
    kept: list[list[list[object]]] = []

    def work(sock: socket.socket, authenticated: bool) -> int:
        kept.append([[] for _ in range(1000)])
        sock.recv(4)
        return 0

    run = ending_silently(work)
    counts = []
    for _ in range(3):
        spark.sendall(b"task")
        run(worker, True)
        counts.append(gc.get_freeze_count())
    assert counts[0] > 1000
    # Some of what is set aside may die meanwhile: it is all that other tests have left.
    assert max(counts[1:]) < counts[0] + 1000, "later garbage is collected"
    assert not any(each is kept[0] for each in gc.get_objects()), "no collection looks at it"
    assert any(each is kept[1] for each in gc.get_objects())


def test_other_failures_reach_pyspark(pair: tuple[socket.socket, socket.socket]) -> None:
    spark, worker = pair
    spark.sendall(b"task")
    for failure in (ZeroDivisionError(), TimeoutError(), OSError("a disk's")):

        def work(sock: socket.socket, authenticated: bool, failure: Exception = failure) -> int:
            raise failure

        with pytest.raises(type(failure)):
            ending_silently(work)(worker, True)


@pytest.mark.parametrize(
    ("name", "has_worker", "is_changed"),
    [("pyspark.daemon", True, True), ("pyspark.daemon", False, False), ("pytest", True, False), (None, True, False)],
)
def test_only_pysparks_own_daemon_is_changed(
    monkeypatch: pytest.MonkeyPatch, name: str | None, has_worker: bool, is_changed: bool
) -> None:
    def work(sock: socket.socket, authenticated: bool) -> int:
        return 0

    main = ModuleType("__main__")
    main.__spec__ = None if name is None else SimpleNamespace(name=name)  # type: ignore[assignment]
    if has_worker:
        main.worker = work  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", main)
    end_silently()
    assert hasattr(main, "worker") is has_worker
    if has_worker:
        assert (main.worker is not work) is is_changed
