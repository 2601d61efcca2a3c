"""Which failures Spark is to show without Python's frames; Spark itself shows them in `test_datasource.py`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator

import pytest

from kafkalog.errors import DataLost, InternalError, KafkalogError
from pyspark_kafkalog.sentences import in_sentences

HIDE = "SPARK_HIDE_TRACEBACK"
OURS, DEFECT = DataLost(reason="x"), InternalError(reason="x")


@in_sentences
class Told:
    """Fails as it is told to."""

    limit = 3

    def __init__(self, failure: Exception | None = None) -> None:
        if failure is not None:
            raise failure

    def fails(self, failure: Exception) -> None:
        raise failure

    def _private(self, failure: Exception) -> None:
        raise failure

    def items(self, failure: Exception) -> Iterator[int]:
        yield from (1, 2)
        raise failure

    def numbers(self, first: int, limit: int = 7) -> list[int]:
        return [first, limit]


@pytest.fixture(params=["PYTHON_WORKER_FACTORY_SECRET", "PYTHON_UNIX_DOMAIN_ENABLED"])
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one of Spark's, that talks over TCP or over a Unix socket."""
    monkeypatch.setenv(request.param, "x")


@pytest.fixture(autouse=True)
def _nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHON_WORKER_FACTORY_SECRET", "PYTHON_UNIX_DOMAIN_ENABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(HIDE, "x")  # so that what a test sets is undone
    monkeypatch.delenv(HIDE)


CALLS: dict[str, Callable[[Exception], object]] = {
    "the constructor": Told,
    "a method": lambda failure: Told().fails(failure),
    "an iterator": lambda failure: list(Told().items(failure)),
}


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("failure, is_hidden", [(OURS, True), (DEFECT, False), (ZeroDivisionError(), False)])
def test_an_error_of_ours_that_is_no_defect_is_shown_as_a_sentence(
    call: Callable[[Exception], object], failure: Exception, is_hidden: bool
) -> None:
    with pytest.raises(type(failure)) as raised:
        call(failure)
    assert raised.value is failure
    assert os.environ.get(HIDE) == ("1" if is_hidden else None)


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_outside_of_sparks_workers_nothing_is_hidden(call: Callable[[Exception], object]) -> None:
    with pytest.raises(KafkalogError):
        call(OURS)
    assert HIDE not in os.environ


@pytest.mark.usefixtures("worker")
def test_an_error_that_does_not_leave_the_class_hides_nothing() -> None:
    with pytest.raises(DataLost):
        Told()._private(OURS)
    assert HIDE not in os.environ


def test_methods_keep_what_they_return_and_their_signatures() -> None:
    """Spark looks at them."""
    told = Told()
    assert told.numbers(1, limit=2) == [1, 2]
    assert list(inspect.signature(told.numbers).parameters) == ["first", "limit"]
    items = told.items(OURS)
    assert (next(items), next(items)) == (1, 2)
    assert Told.limit == 3
