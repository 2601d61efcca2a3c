"""Makes Spark show errors of kafkalog as one sentence, without Python's frames.

Spark's Python workers report a failure with its traceback, 7 to 44 lines of PySpark's frames and ours for a misspelt
option, unless SPARK_HIDE_TRACEBACK is set where they run. A worker ends after it has reported a failure. So the
variable is set in a worker that is about to report an error of kafkalog; other errors keep their frames.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)
_OF_A_WORKER = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHON_UNIX_DOMAIN_ENABLED")
"""What Spark sets in the environment of each Python that it starts to work for it."""


def in_sentences(cls: _Class) -> _Class:
    """Class decorator: errors of kafkalog that leave the constructor and public methods are shown as sentences."""
    for name, method in list(vars(cls).items()):
        if callable(method) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, _told(method))
    return cls


def _told(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)  # Spark looks at the signature of latestOffset
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = method(*args, **kwargs)
        except Exception as error:
            _hide_frames_of(error)
            raise
        return _each(result) if isinstance(result, Iterator) else result

    return call


def _each(items: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from items
    except Exception as error:
        _hide_frames_of(error)
        raise


def _hide_frames_of(error: Exception) -> None:
    from kafkalog.errors import InternalError, KafkalogError

    is_plain = isinstance(error, KafkalogError) and not isinstance(error, InternalError)
    if is_plain and any(name in os.environ for name in _OF_A_WORKER):
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
