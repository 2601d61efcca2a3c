"""A client's connection to a broker's gRPC service. Failures are raised as errors of `errors.py`.

A connection belongs to the process that made it: a forked child must leave it alone (`abandon`). Nothing connects at
import. No interrupt comes amid gRPC's code (`main_thread.py`). Knows no topics, retries or caches.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kafkalog.errors import (
    BrokerBusy,
    BrokerNotAsked,
    BrokerUnreachable,
    Closed,
    InternalError,
    KafkalogError,
    NoCommonVersion,
    ProtocolError,
    RequestTimedOut,
    RequestTooLarge,
)
from kafkalog.net.data import DataConnection
from kafkalog.net.main_thread import off_main_thread
from kafkalog.net.tcp import connect, format_address
from kafkalog.wire import broker_pb2, dataport_pb2
from kafkalog.wire.frames import common_version, error_from_wire
from kafkalog.wire.ranges import versions_from_wire
from kafkalog.wire.service import METHODS

if TYPE_CHECKING:
    import grpc

# Read when gRPC is imported, which is later. Its failures are raised as errors; what it logs besides, such as of a fork
# beside a call, is written to the user's stderr.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

_RPC_MESSAGE_MAX = 64 << 20
_CHANNEL_END_SECONDS = 0.02
_KEEPALIVE_MS = 2_000
_KEEPALIVE_TIMEOUT_MS = 4_000
"""A busy broker answers pings all the same: gRPC does so by itself."""
_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\.? (\d+)\)")
_HTTP2_START = b"\x00\x00"  # a gRPC server greets with a SETTINGS frame, whose 24-bit length is small


class PendingCall:
    """A call of `ControlConnection.begin`.

    Attributes:
        is_done: there is a result, or it was cancelled. Set by gRPC's thread, because asking gRPC takes a lock.
    """

    def __init__(self, future: Any, translated: Callable[[Any], KafkalogError], ended: Callable[[], None]) -> None:
        self._future = future
        self._translated = translated
        self._ended = ended
        self.is_done = False

    def result(self) -> Any:
        """The broker's answer; the call must be done. Raises as `ControlConnection.call` does."""
        import grpc

        try:
            return off_main_thread(self._future.result)
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            if isinstance(error, grpc.FutureCancelledError):
                raise Closed(what="call") from None
            raise self._translated(error) from None

    def cancel(self) -> None:
        off_main_thread(self._future.cancel)
        self.is_done = True
        self._ended()  # gRPC reports the end later; a fork may come before


class ControlConnection:
    """A broker's gRPC service at one address.

    Args:
        connect_timeout_ms: for the first answer.
    """

    def __init__(self, host: str, port: int, *, connect_timeout_ms: int) -> None:
        self.address = format_address(host, port)
        self._host, self._port = host, port
        self._connect_timeout_ms = connect_timeout_ms
        self._lock = threading.Lock()  # guards all below
        self._channel: grpc.Channel | None = None
        self._methods: dict[str, Any] = {}
        self._calls = 0
        self._begun: set[Any] = set()  # gRPC's futures of the calls of `begin`
        self._is_closed = False
        _controls[id(self)] = self

    def connect(self) -> broker_pb2.ClusterDescription:
        """Connect, and request the cluster's description.

        Raises:
            BrokerUnreachable: nothing answers there in time.
            ProtocolError: the peer is not a broker's gRPC service, or has no protocol version in common.
        """
        started = time.monotonic()
        # A plain TCP connect reports a refused or silent address at once and in plain words; gRPC would retry.
        connect(self._host, self._port, self._connect_timeout_ms).close()
        left_ms = max(1, self._connect_timeout_ms - int((time.monotonic() - started) * 1000))
        try:
            cluster: broker_pb2.ClusterDescription
            cluster = self.call("DescribeCluster", broker_pb2.DescribeClusterRequest(), left_ms)
            common_version(self.address, versions_from_wire(cluster.protocol))
            return cluster
        except NoCommonVersion:
            self.close()
            raise
        except (BrokerUnreachable, RequestTimedOut, ProtocolError) as error:
            if self._is_closed:  # by another thread, which does not wait for a diagnosis
                raise
            self.close()
            raise self._diagnosis(error) from None
        except KafkalogError:  # a broker that is stopping or busy
            self.close()
            raise

    def call(self, method: str, request: Any, timeout_ms: int) -> Any:
        """One call of the service.

        Raises:
            BrokerNotAsked: the connection was closed before the call.
            BrokerUnreachable, RequestTimedOut, ProtocolError: the call or its answer did not get through, or the
                connection was closed during the call; the broker may have received it.
            KafkalogError: the broker's error.
        """
        return off_main_thread(partial(self._call, method, request, timeout_ms))

    def _call(self, method: str, request: Any, timeout_ms: int) -> Any:
        import grpc

        with self._lock:
            callable = self._method(method)
            self._calls += 1
        try:
            return callable(request, timeout=timeout_ms / 1000)
        except grpc.RpcError as error:
            raise self._translated(method, error, timeout_ms) from None
        except ValueError:  # gRPC's for a closed channel, before it begins a call
            if not self._is_closed:
                raise
            raise self._not_asked() from None  # closed since the lock was released
        finally:
            with self._lock:
                self._calls -= 1

    def begin(self, method: str, request: Any, timeout_ms: int, done: Callable[[], None]) -> PendingCall:
        """Begin a call of the service. Raises BrokerNotAsked.

        Args:
            done: called from another thread, once there is a result or the call was cancelled.
        """
        return off_main_thread(partial(self._begin, method, request, timeout_ms, done))

    def _begin(self, method: str, request: Any, timeout_ms: int, done: Callable[[], None]) -> PendingCall:
        with self._lock:
            future = self._method(method).future(request, timeout=timeout_ms / 1000)
            self._begun.add(future)

        def ended() -> None:
            with self._lock:
                self._begun.discard(future)

        pending = PendingCall(future, lambda error: self._translated(method, error, timeout_ms), ended)

        def end(_: Any) -> None:
            pending.is_done = True
            ended()
            done()

        future.add_done_callback(end)
        return pending

    def _method(self, name: str) -> Any:
        """Lock held: a method of the service. Opens a channel if there is none, also after a fork closed it. Raises
        BrokerNotAsked."""
        if self._is_closed:
            raise self._not_asked()
        known = self._methods.get(name)
        if known is None:
            if self._channel is None:
                self._channel = self._new_channel()
            known = self._methods[name] = METHODS[name].on(self._channel)
        return known

    def _not_asked(self) -> BrokerNotAsked:
        return BrokerNotAsked(address=self.address, reason="the connection was closed here")

    def _new_channel(self) -> grpc.Channel:
        import grpc

        options = [
            ("grpc.max_receive_message_length", _RPC_MESSAGE_MAX),
            ("grpc.max_send_message_length", _RPC_MESSAGE_MAX),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            # While calls wait: a suspended process, or a machine without power, does not end its connections.
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        return grpc.insecure_channel(self.address, options)

    def _translated(self, method: str, error: grpc.RpcError, timeout_ms: int) -> KafkalogError:
        import grpc

        for each in error.trailing_metadata() or ():
            if each.key == "kafkalog-error-bin":
                return error_from_wire(dataport_pb2.Error.FromString(each.value))
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.UNAVAILABLE:
            return BrokerUnreachable(address=self.address, reason=details or "it is not available")
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return RequestTimedOut(what=method, address=self.address, timeout_ms=timeout_ms)
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            too_large = _TOO_LARGE.search(details)
            if too_large is None:  # gRPC's own limit of calls at once, which the broker's code does not see
                return BrokerBusy(broker=self.address, reason=details or "it has too many calls")
            size, limit = map(int, too_large.groups())
            return RequestTooLarge(size=size, setting="message limit over gRPC", limit=limit)
        if code == grpc.StatusCode.CANCELLED:
            return BrokerUnreachable(address=self.address, reason="the connection was closed here")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolError(
                address=self.address, reason=f"this server has no {method}: it is not a kafkalog broker, or is older"
            )
        return InternalError(reason=f"{method} at {self.address}: {code.name} {details}")

    def _diagnosis(self, error: KafkalogError) -> KafkalogError:
        """Why a port that accepts connections does not answer: it may be a data port, or not a broker's."""
        if isinstance(error, ProtocolError):
            return error
        try:
            DataConnection(
                self._host, self._port, connect_timeout_ms=min(1000, self._connect_timeout_ms), request_timeout_ms=1000
            ).close()
        except (BrokerUnreachable, ProtocolError):
            pass
        else:
            return ProtocolError(
                address=self.address, reason="this is a broker's data port; give its gRPC port in bootstrap.servers"
            )
        if isinstance(error, RequestTimedOut):
            reason = (
                f"it accepts connections but does not answer within {self._connect_timeout_ms} ms as a kafkalog broker"
            )
        elif _answers_as_grpc(self._host, self._port):
            reason = "its gRPC service closed the connection"
        else:
            reason = "the server there is not the gRPC port of a kafkalog broker"
        return BrokerUnreachable(address=self.address, reason=reason)

    def close(self) -> None:
        """Close the connection for good, and end the calls in flight."""
        with self._lock:
            self._is_closed = True
            channel = self._take_channel()
        # Without the lock: gRPC waits for the ends of all calls, which one thread reports, and `begin` takes the lock
        # at each.
        off_main_thread(partial(_close, channel))

    def _take_channel(self) -> grpc.Channel | None:
        """Lock held."""
        channel, self._channel, self._methods = self._channel, None, {}
        return channel

    def close_if_idle(self) -> bool:
        """Close the channel if there is one, and no call uses it or is about to; returns whether it was closed."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._channel is None or self._calls or self._begun:
                return False
            _close(self._take_channel())
            return True
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Forget the channel in a forked child: without its threads it can be neither used nor closed."""
        if self._channel is not None:
            _ABANDONED.append(self._channel)
        self._channel, self._methods = None, {}


_ABANDONED: list[Any] = []  # channels of a parent: destroying one in a child would wait for threads that do not exist


def _answers_as_grpc(host: str, port: int) -> bool:
    """Whether a server greets with an HTTP/2 frame."""
    try:
        with connect(host, port, 1000) as probe:
            probe.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
            readable, _, _ = select.select([probe], [], [], 1.0)
            return bool(readable) and probe.recv(2) == _HTTP2_START
    except (OSError, KafkalogError):
        return False


# --- forks: owners define what a child does with connections (`forks.py`) ---------------------------------------

_closed_at: deque[float] = deque([-_CHANNEL_END_SECONDS], maxlen=1)  # when a channel was last closed


def _close(channel: grpc.Channel | None) -> None:
    if channel is not None:
        channel.close()
        _closed_at.append(time.monotonic())


_controls: weakref.WeakValueDictionary[int, ControlConnection] = weakref.WeakValueDictionary()


def _before_fork() -> None:
    """Close the gRPC channels without a call in flight; the next call opens another one.

    With an open channel, gRPC's fork handlers abort one in twenty children that execute another program, as when
    PySpark starts Java (`subprocess` with a preexec_fn). Directly after the close they make the child hang instead.
    """
    controls = [reference() for reference in _controls.valuerefs()]  # a copy: other threads may add to them
    for control in controls:
        if control is not None:
            control.close_if_idle()
    # gRPC releases a channel in a thread of its own and offers nothing to wait for: no event, no callback, no state to
    # read. Without a pause a child hung within 1,000 forks; with 5 ms none did. 20 ms leave a margin.
    time.sleep(max(0.0, _closed_at[0] + _CHANNEL_END_SECONDS - time.monotonic()))


os.register_at_fork(before=_before_fork)
