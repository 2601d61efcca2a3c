"""Makes a session expire, ZooKeeper's own way: another client takes it over by id and password, and closes it."""

from __future__ import annotations

import threading

from kazoo.client import KazooClient

from kafkalog.zk.session import ZooKeeperSession


def expire(session: ZooKeeperSession) -> None:
    """Return once ZooKeeper has dropped the session and it has a new one."""
    session_id = session.session_id
    pause = threading.Event()
    for _ in range(20):
        twin = KazooClient(hosts=session.address.hosts, client_id=session._client.client_id)
        twin.start(timeout=30)
        twin.stop()
        twin.close()
        # The session's own client takes it back when it is quicker than the close: then once more.
        for _ in range(100):
            if session.session_id not in (session_id, 0):
                return
            pause.wait(0.02)
    raise AssertionError("the session does not expire")
