"""Calls in other threads whose outcomes nobody waits for any more: they are dropped without a word."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from kafkalog.aio.calls import Caller, begin
from tests.waiting import waited_for


@pytest.mark.parametrize("how", ["in a thread of its own", "by a caller"])
def test_the_outcome_of_a_call_that_outlives_its_event_loop_is_dropped(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    may_end, caller = threading.Event(), Caller()

    async def main() -> None:
        (begin if how == "in a thread of its own" else caller.begin)(lambda: may_end.wait(30))

    asyncio.run(main())
    waited_for(lambda: bool(set(threading.enumerate()) - before))
    may_end.set()
    caller.stop()
    waited_for(lambda: not set(threading.enumerate()) - before)
    assert caplog.text == ""


def test_a_failure_that_nobody_waits_for_is_not_logged_by_asyncio() -> None:
    before, told = set(threading.enumerate()), list[dict[str, Any]]()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        await asyncio.wait([begin(lambda: 1 // 0)])

    asyncio.run(main())
    waited_for(lambda: not set(threading.enumerate()) - before)
    gc.collect()  # of the future: asyncio logs then what nobody asked for
    assert told == []
