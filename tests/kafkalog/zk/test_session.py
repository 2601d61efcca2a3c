"""The session with a real ZooKeeper: outcomes, watches, loss of the connection and of the session."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.zookeeper import EmbeddedZooKeeper
from kafkalog.errors import InvalidSetting, ZooKeeperUnreachable
from kafkalog.zk.session import (
    BadVersion,
    Check,
    Create,
    Delete,
    NodeExists,
    NoNode,
    Set,
    ZooKeeperSession,
    parse_connect,
)
from tests.kafkalog.zk.expiry import expire


@pytest.mark.parametrize(
    "text, hosts, chroot",
    [
        ("h:1", "h:1", "/kafkalog"),
        ("h:1/", "h:1", "/kafkalog"),
        ("a:1, b:2/x/y/", "a:1,b:2", "/x/y"),
        ("[::1]:2181/c", "[::1]:2181", "/c"),
    ],
)
def test_a_connect_string_has_hosts_and_a_chroot(text: str, hosts: str, chroot: str) -> None:
    assert parse_connect(text) == (hosts, chroot)


@pytest.mark.parametrize("text", ["", "h", "h:", "h:x", "h:70000", "a:1,b", "h:1/a//b", "a b:1"])
def test_a_connect_string_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"zookeeper\.connect"):
        parse_connect(text)


def test_znodes_are_made_read_written_and_removed_at_their_version(session: ZooKeeperSession) -> None:
    session.create("/a/b", b"one")
    with pytest.raises(NodeExists):
        session.create("/a/b")
    content, stat = session.get("/a/b")
    assert (content, stat.version) == (b"one", 0)
    assert session.set("/a/b", b"two", 0).version == 1
    with pytest.raises(BadVersion):
        session.set("/a/b", b"three", 0)
    with pytest.raises(BadVersion):
        session.delete("/a/b", 0)
    assert session.children("/a") == ["b"]
    session.delete("/a/b", 1)
    with pytest.raises(NoNode):
        session.get("/a/b")
    assert session.exists("/a/b") is None
    session.ensure(["/x/y/z", "/x/y/z"])
    session.delete_tree("/x")
    session.delete_tree("/x")
    assert session.exists("/x") is None


def test_a_multi_happens_as_a_whole_or_not_at_all(session: ZooKeeperSession) -> None:
    session.multi([Create("/a", b"1"), Create("/a/b"), Set("/a", b"2", 0)])
    assert session.get("/a")[0] == b"2"
    for last, error in (
        (Check("/a", 7), BadVersion),
        (Create("/a"), NodeExists),
        (Set("/none", b""), NoNode),
        (Delete("/a/b", 5), BadVersion),
    ):
        with pytest.raises(error):
            session.multi([Set("/a", b"3"), Create("/new"), last])
    assert session.get("/a")[0] == b"2"
    assert session.exists("/new") is None
    session.multi([])


def test_many_znodes_are_read_at_once_and_missing_ones_are_none(session: ZooKeeperSession) -> None:
    session.multi([Create("/many"), *(Create(f"/many/{number}", b"%d" % number) for number in range(0, 1200, 2))])
    found = session.get_many([f"/many/{number}" for number in range(1200)])
    assert [content and content[0] for content in found] == [
        None if number % 2 else b"%d" % number for number in range(1200)
    ]


def test_watches_tell_of_a_change_a_making_and_a_new_child_once(
    new_session: Callable[[], ZooKeeperSession],
) -> None:
    session, other = new_session(), new_session()
    changed: queue.Queue[str] = queue.Queue()
    session.create("/w/there")
    for _ in range(3):  # watching again adds nothing
        assert session.get_many(["/w/there", "/w/not-yet"], changed.put)[1] is None
        session.children("/w", changed.put)
    other.set("/w/there", b"x")
    assert changed.get(timeout=30) == "/w/there"
    other.create("/w/not-yet")
    assert {changed.get(timeout=30), changed.get(timeout=30)} == {"/w/not-yet", "/w"}
    other.set("/w/there", b"y")
    session.get("/w")  # answers come in order, so a second event would be here by now
    assert changed.empty()


def test_ephemeral_znodes_go_with_their_session(new_session: Callable[[], ZooKeeperSession]) -> None:
    one, other = new_session(), new_session()
    one.create("/e/mine", ephemeral=True)
    gone: queue.Queue[str] = queue.Queue()
    assert other.get("/e/mine", gone.put)[1].ephemeralOwner == one.session_id
    one.close()
    assert gone.get(timeout=30) == "/e/mine"
    one.close()


def test_an_unreachable_zookeeper_is_told_within_its_time_and_by_its_address() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        session = ZooKeeperSession(address, connection_timeout_ms=200)
        began = time.monotonic()
        threads = threading.active_count()
        with pytest.raises(ZooKeeperUnreachable, match=f"ZooKeeper at {address} is not reachable"):
            session.start()
        assert time.monotonic() - began < 10
        assert threading.active_count() <= threads


def test_calls_fail_in_bounded_time_while_it_is_away_and_work_when_it_is_back(tmp_path: Path) -> None:
    server = EmbeddedZooKeeper(tmp_path, durable=False)
    server.start()
    server.wait_ready(threading.Event().wait)
    session = ZooKeeperSession(server.connect, session_timeout_ms=4000, request_timeout_ms=500)
    states: queue.Queue[tuple[bool, bool]] = queue.Queue()
    session.on_state(lambda connected, is_new: states.put((connected, is_new)))
    session.start()
    assert states.get(timeout=30) == (True, False)
    try:
        session.create("/kept", b"x")
        session.create("/mine", ephemeral=True)
        server.kill()
        assert states.get(timeout=30) == (False, False)
        assert not session.connected
        began = time.monotonic()
        with pytest.raises(ZooKeeperUnreachable, match=f"{server.connect} is not reachable"):
            session.get("/kept")
        assert time.monotonic() - began < 10
        server.start()
        server.wait_ready(threading.Event().wait)
        assert states.get(timeout=30) == (True, False)
        assert session.get("/kept")[0] == b"x"
        assert session.exists("/mine") is not None  # the session outlived it
    finally:
        session.close()
        server.stop()


def test_a_lost_session_is_told_as_such(session: ZooKeeperSession) -> None:
    states: queue.Queue[tuple[bool, bool]] = queue.Queue()
    session.on_state(lambda connected, is_new: states.put((connected, is_new)))
    session.create("/mine", ephemeral=True)
    expire(session)
    seen = [states.get(timeout=30)]
    while seen[-1] != (True, True):
        seen.append(states.get(timeout=30))
    assert (False, False) in seen
    assert session.exists("/mine") is None
