"""The session with a real ZooKeeper: outcomes, watches, loss of the connection and of the session."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.folder_lock import lock_folder
from broker.local.zookeeper import EmbeddedZooKeeper
from kafkalog.errors import InvalidSetting, TooLargeForZooKeeper, ZooKeeperNotAsked, ZooKeeperUnreachable
from kafkalog.zk import client
from kafkalog.zk import session as session_module
from kafkalog.zk.client import Request
from kafkalog.zk.session import (
    REQUEST_BYTES_MAX,
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
from tests.proxy import StallingProxy
from tests.threads import join_all
from tests.waiting import waited_for

NewSession = Callable[..., ZooKeeperSession]


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


@pytest.mark.parametrize("text", ["h1:1/a, h2:2/a", "h1:1,h2:2/a,", "h1:1/a,h2:2"])
def test_a_chroot_that_is_not_behind_the_last_host_alone_is_refused_and_written_as_it_must_be(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"give the chroot once, after the last host: h1:1,h2:2/a$"):
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
    assert session.children("/x/y") == ["z"]


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


def test_a_znode_made_between_the_read_and_the_watch_is_read(
    new_session: Callable[[], ZooKeeperSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = new_session(), new_session()
    read = session._call_all

    def and_then_it_is_made(wanted: Sequence[Request[Any]]) -> list[Any]:
        monkeypatch.setattr(session, "_call_all", read)
        found = read(wanted)
        other.create("/late", b"x")
        return found

    monkeypatch.setattr(session, "_call_all", and_then_it_is_made)
    changed: queue.Queue[str] = queue.Queue()
    [found] = session.get_many(["/late"], changed.put)
    assert found is not None
    assert found[0] == b"x"
    other.set("/late", b"y")
    assert changed.get(timeout=30) == "/late"


def test_ephemeral_znodes_go_with_their_session(new_session: Callable[[], ZooKeeperSession]) -> None:
    one, other = new_session(), new_session()
    one.create("/e/mine", ephemeral=True)
    gone: queue.Queue[str] = queue.Queue()
    assert other.get("/e/mine", gone.put)[1].ephemeralOwner == one.session_id
    one.close()
    assert gone.get(timeout=30) == "/e/mine"
    one.close()


def test_an_unreachable_zookeeper_is_reported_within_its_time_with_its_address_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_module, "_WAIT_TOLD_SECONDS", 0.1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        session = ZooKeeperSession(address, connection_timeout_ms=300)
        began = time.monotonic()
        threads = threading.active_count()
        with pytest.raises(ZooKeeperUnreachable) as raised:
            session.start()
        assert time.monotonic() - began < 10
        assert threading.active_count() <= threads
    reason = "no connection within 0.3 s: connection refused"
    assert str(raised.value) == f"ZooKeeper at {address} is not reachable: {reason}"
    [told] = [record.getMessage() for record in caplog.records if "zookeeper_awaited" in record.getMessage()]
    assert f'address={address} reason="connection refused"' in told


def test_each_host_has_its_own_reason() -> None:
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as silent:
        closed.bind(("127.0.0.1", 0))
        hosts = [f"127.0.0.1:{each.getsockname()[1]}" for each in (closed, silent)] + ["no-such-host.invalid:1"]
        session = ZooKeeperSession(",".join(hosts), session_timeout_ms=200, connection_timeout_ms=1000)
        with pytest.raises(ZooKeeperUnreachable) as raised:
            session.start()
    reasons = ("connection refused", "timed out", "the name no-such-host.invalid cannot be resolved")
    each = "; ".join(f"{host}: {reason}" for host, reason in zip(hosts, reasons, strict=True))
    assert str(raised.value).endswith(f" is not reachable: no connection within 1 s: {each}")


def test_a_start_that_gets_a_connection_and_no_answer_leaves_neither_it_nor_a_thread(
    zookeeper: EmbeddedZooKeeper, proxy: StallingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ZooKeeperSession(f"127.0.0.1:{proxy.port}/never", session_timeout_ms=1500, request_timeout_ms=200)
    threads = set(threading.enumerate())
    ensure = session._ensure

    def hold_and_ensure(path: str) -> None:
        proxy.hold()
        ensure(path)

    monkeypatch.setattr(session, "_ensure", hold_and_ensure)
    with pytest.raises(ZooKeeperUnreachable):
        session.start()
    assert not session.connected
    of_kazoo = [thread for thread in set(threading.enumerate()) - threads if "_pump" not in thread.name]
    assert of_kazoo == []


def test_calls_fail_in_bounded_time_while_it_is_away_and_work_when_it_is_back(tmp_path: Path) -> None:
    server = EmbeddedZooKeeper(tmp_path, durable=False)
    server.start()
    server.wait_ready(threading.Event().wait)
    session = ZooKeeperSession(server.connect, session_timeout_ms=4000, request_timeout_ms=500)
    states: queue.Queue[tuple[bool, bool]] = queue.Queue()
    session.on_state(lambda connected, is_new: states.put((connected, is_new)))
    session.start()
    assert states.get(timeout=30) == (True, True)
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
        lock_folder(tmp_path, "zookeeper.lock").close()  # its folder is anybody's
        server.start()
        server.wait_ready(threading.Event().wait)
        assert states.get(timeout=30) == (True, False)
        assert session.get("/kept")[0] == b"x"
        assert session.exists("/mine") is not None  # the session outlived it
    finally:
        session.close()
        server.stop()


def test_a_lost_session_is_reported_as_such(session: ZooKeeperSession) -> None:
    states: queue.Queue[tuple[bool, bool]] = queue.Queue()
    session.on_state(lambda connected, is_new: states.put((connected, is_new)))
    session.create("/mine", ephemeral=True)
    expire(session)
    seen = [states.get(timeout=30)]
    while seen[-1] != (True, True):
        seen.append(states.get(timeout=30))
    assert (False, False) in seen
    assert session.exists("/mine") is None


def test_a_connection_that_is_lost_after_a_session_was_keeps_the_new_one(
    new_session: NewSession, proxy: StallingProxy
) -> None:
    session = new_session(proxy)
    expire(session)
    session.ensure(["/a"])
    states: queue.Queue[tuple[bool, bool]] = queue.Queue()
    session.on_state(lambda connected, is_new: states.put((connected, is_new)))
    proxy.cut()
    assert states.get(timeout=30) == (False, False)
    proxy.resume()
    assert states.get(timeout=30) == (True, False)


def test_a_lost_session_is_no_change_of_a_znode(session: ZooKeeperSession) -> None:
    """kazoo calls all watches then, without a path."""
    changed: queue.Queue[str] = queue.Queue()
    session.create("/w")
    session.get("/w", changed.put)
    expire(session)
    session.get("/w", changed.put)
    session.set("/w", b"x")
    assert changed.get(timeout=30) == "/w"
    assert changed.empty()


def test_a_parent_that_goes_as_soon_as_it_is_made_is_made_again(
    new_session: NewSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = new_session(), new_session()
    ensure, made = session._ensure, []

    def and_then_it_goes(path: str) -> None:
        ensure(path)
        made.append(path)
        if len(made) == 1:
            other.delete(path)

    monkeypatch.setattr(session, "_ensure", and_then_it_goes)
    session.create("/p/child", b"x")
    assert made == ["/p", "/p"]
    assert session.get("/p/child")[0] == b"x"


# --- requests that ZooKeeper does not answer -------------------------------------------------------------------------


def disconnect(session: ZooKeeperSession, proxy: StallingProxy) -> None:
    proxy.cut()
    waited_for(lambda: not session.connected)


def reconnect(session: ZooKeeperSession, proxy: StallingProxy) -> None:
    proxy.resume()
    waited_for(lambda: session.connected)


def test_a_request_while_it_is_away_is_refused_at_once_and_never_executed(
    new_session: NewSession, proxy: StallingProxy
) -> None:
    session = new_session(proxy, request_timeout_ms=600_000)
    session.create("/kept", b"before")
    disconnect(session, proxy)
    for _ in range(1000):  # more than kazoo's wake-up socket takes
        with pytest.raises(ZooKeeperNotAsked, match="there is no connection"):
            session.set("/kept", b"while it was away")
    with pytest.raises(ZooKeeperNotAsked):
        session.get_many(["/kept"] * 600)
    reconnect(session, proxy)
    assert session.get("/kept")[0] == b"before"


def test_a_request_that_was_not_sent_in_time_is_taken_back_and_one_that_was_is_unknown(
    new_session: NewSession, proxy: StallingProxy
) -> None:
    session = new_session(proxy, session_timeout_ms=60_000, request_timeout_ms=1000)
    proxy.hold()
    outcomes: dict[str, ZooKeeperUnreachable] = {}

    def create(path: str) -> None:
        try:
            session.create(path, bytes(REQUEST_BYTES_MAX - 1000))
        except ZooKeeperUnreachable as error:
            outcomes[path] = error

    # Sockets take some megabytes of them, and the rest stays in the queue.
    threads = [threading.Thread(target=create, args=(f"/{number}",)) for number in range(24)]
    for thread in threads:
        thread.start()
    join_all(threads, 60)
    assert len(outcomes) == 24
    not_asked = {path for path, error in outcomes.items() if isinstance(error, ZooKeeperNotAsked)}
    assert 0 < len(not_asked) < 24
    assert not session._client._queue
    proxy.resume()
    made: list[str] = []

    def answered() -> bool:
        try:
            made[:] = session.children("")  # in order: what was sent before it is executed before it
        except ZooKeeperUnreachable:
            return False
        return True

    waited_for(answered)
    assert {f"/{name}" for name in made} == set(outcomes) - not_asked


def test_an_answer_lost_with_the_connection_is_unknown_and_not_as_if_it_had_not_been_asked(
    new_session: NewSession, proxy: StallingProxy
) -> None:
    session = new_session(proxy)
    session.create("/a")
    proxy.hold()
    raised: list[ZooKeeperUnreachable] = []

    def write() -> None:
        try:
            session.set("/a", b"x")
        except ZooKeeperUnreachable as error:
            raised.append(error)

    writing = threading.Thread(target=write)
    writing.start()
    waited_for(lambda: bool(session._client._pending))
    proxy.cut()
    join_all([writing], 60)
    assert [type(error) for error in raised] == [ZooKeeperUnreachable]


def test_requests_without_an_answer_are_bounded(
    new_session: NewSession, proxy: StallingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "OUTSTANDING_MAX", 100)
    session = new_session(proxy)
    proxy.hold()
    with pytest.raises(ZooKeeperNotAsked, match="100 requests wait for an answer"):
        session.get_many(["/a"] * 500)
    proxy.resume()
    waited_for(lambda: not session._client._pending)
    assert session.get_many(["/a"] * 99) == [None] * 99


def test_a_server_that_is_silent_is_noticed_however_many_ask_it(new_session: NewSession, proxy: StallingProxy) -> None:
    session = new_session(proxy, session_timeout_ms=4000, request_timeout_ms=100)
    silent = threading.Event()
    session.on_state(lambda connected, _: None if connected else silent.set())
    proxy.hold()
    until = time.monotonic() + 60
    while not silent.is_set():
        assert time.monotonic() < until
        with pytest.raises(ZooKeeperUnreachable):
            session.get("/a")
    reconnect(session, proxy)
    session.ensure(["/a"])


def test_a_session_is_kept_for_its_timeout_from_the_last_request_that_was_answered(
    new_session: NewSession, proxy: StallingProxy
) -> None:
    session = new_session(proxy, session_timeout_ms=4000)
    began = time.monotonic()
    session.exists("/a")
    asked = session._client.kept_until - 4
    assert began <= asked <= time.monotonic()
    waited_for(lambda: session._client.kept_until > asked + 4)  # by a ping
    proxy.hold()
    held = time.monotonic()
    pinged = session._client._connection._pinged_at
    waited_for(lambda: session._client._connection._pinged_at > pinged)
    kept_until = session._client.kept_until
    assert kept_until <= held + 4 and session.is_kept
    waited_for(lambda: not session.is_kept)
    assert session._client.kept_until == kept_until <= time.monotonic()
    proxy.resume()
    waited_for(lambda: session.is_kept)


@pytest.mark.parametrize("asked_ms", [2002, 65_526, 3_600_000])
def test_a_session_has_the_timeout_that_is_asked_for(
    new_session: NewSession, asked_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    session = new_session(session_timeout_ms=asked_ms)
    waited_for(lambda: session._client._connection.session_seconds == asked_ms / 1000)
    assert "zookeeper_session_timeout_changed" not in caplog.text


def test_another_timeout_of_a_session_than_was_asked_for_is_told_of_once(
    new_session: NewSession, proxy: StallingProxy, caplog: pytest.LogCaptureFixture
) -> None:
    short = new_session(proxy, session_timeout_ms=500)
    waited_for(lambda: "zookeeper_session_timeout_changed asked_ms=500 granted_ms=2000" in caplog.text)
    disconnect(short, proxy)
    reconnect(short, proxy)
    short.ensure(["/a"])
    assert caplog.text.count("zookeeper_session_timeout_changed") == 1


def test_a_request_waits_for_the_connection_where_patience_was_asked_for(
    new_session: NewSession, proxy: StallingProxy
) -> None:
    session = new_session(proxy, connection_timeout_ms=60_000)
    session.create("/a", b"x")
    disconnect(session, proxy)
    read: list[bytes] = []

    def get() -> None:
        with session.patient():
            read.append(session.get("/a")[0])

    reading = threading.Thread(target=get)
    reading.start()
    with pytest.raises(ZooKeeperNotAsked):  # patience is a thread's own
        session.get("/a")
    reconnect(session, proxy)
    join_all([reading], 60)
    assert read == [b"x"]


def test_patience_is_over_at_the_end_of_its_block(session: ZooKeeperSession, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(session._client, "wait_connected", waits.append)
    session.create("/a")
    with session.patient():
        with session.patient():
            session.get("/a")
        session.get("/a")
    assert len(waits) == 2
    session.get("/a")
    assert len(waits) == 2


def test_nothing_is_sent_for_a_caller_that_gave_up(session: ZooKeeperSession) -> None:
    session.create("/a")
    waiting = True
    with session.on_behalf_of(lambda: waiting):
        session.set("/a", b"1")
        waiting = False
        with pytest.raises(ZooKeeperNotAsked, match="the caller no longer waits"):
            session.set("/a", b"2")
    assert session.get("/a")[0] == b"1"


def test_what_is_too_large_for_zookeeper_is_refused_and_the_connection_stays(session: ZooKeeperSession) -> None:
    states: list[bool] = []
    session.on_state(lambda connected, _: states.append(connected))
    session.create("/a")
    full = bytes(REQUEST_BYTES_MAX - 200)
    session.set("/a", full)
    for write in (
        lambda: session.set("/a", bytes(1 << 20)),
        lambda: session.create("/b/c", bytes(REQUEST_BYTES_MAX)),
        lambda: session.multi([Set("/a", full[:600_000]), Create("/b", full[:500_000]), Delete("/a")]),
        lambda: session.get("/" + "x" * (1 << 20)),
    ):
        with pytest.raises(TooLargeForZooKeeper) as raised:
            write()
        assert not raised.value.retriable
        assert raised.value.facts["limit"] == REQUEST_BYTES_MAX
    assert session.get("/a")[0] == full
    assert session.exists("/b") is None
    assert states == []
