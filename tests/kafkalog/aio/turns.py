"""Whether other tasks of an event loop run on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def turns_of_others() -> AsyncIterator[Callable[[], int]]:
    """During the `async with` block another task runs; yields a function that returns how many turns it has had."""
    turns = 0

    async def run() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(run())
    try:
        yield lambda: turns
    finally:
        task.cancel()
