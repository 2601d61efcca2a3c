"""The views by themselves; what is read into them is in `test_host.py`."""

from __future__ import annotations

import threading
from typing import Any

from broker.replica.metadata import Metadata
from tests.threads import join_all


def test_who_waits_is_let_go_as_the_broker_stops() -> None:
    session: Any = None
    metadata = Metadata(session)
    looked, found = threading.Event(), list[bool]()

    def never() -> bool:
        looked.set()
        return False

    waiting = threading.Thread(target=lambda: found.append(metadata.wait_until(never, 60.0)), daemon=True)
    waiting.start()
    assert looked.wait(30)
    metadata.stop()  # takes the lock, which that thread holds until it waits
    join_all([waiting], 30)
    assert found == [False]
    assert metadata.wait_until(lambda: True, 60.0), "what was reached is told all the same"
