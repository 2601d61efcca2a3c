"""A client of the data port for tests: raw sockets and frames, so that it can also send what no client would."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from kafkalog.format.batch import encode_batch
from kafkalog.format.columns import columns_from_lists, encode_columns
from kafkalog.versions import PROTOCOL
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire import frames


def a_batch(
    values: Sequence[bytes | None] = (b"value",), *, codec: int = 0, timestamp_us: int = 1_000_000, **header: int
) -> bytes:
    """A record batch as a producer makes it."""
    columns = columns_from_lists(values, timestamp_us)
    return encode_batch(
        encode_columns(columns.batch, codec),
        codec=codec,
        attributes=columns.attributes,
        record_count=len(values),
        min_timestamp_us=columns.min_timestamp_us,
        max_timestamp_us=columns.max_timestamp_us,
        **header,
    ).tobytes()


def append_frame(
    correlation_id: int, topic_id: bytes, body: bytes, *, partition: int = 0, acks: int = 1, timeout_ms: int = 10_000
) -> bytes:
    part = pb.AppendPartition(topic_id=topic_id, partition=partition, length=len(body))
    request = pb.AppendRequest(acks=acks, timeout_ms=timeout_ms, partitions=[part])
    header = pb.RequestHeader(correlation_id=correlation_id, append=request).SerializeToString()
    return frames.frame_start(header, len(body)) + body


def stage_frame(correlation_id: int, topic_id: bytes, body: bytes, *, partition: int = 0) -> bytes:
    part = pb.StagePartition(topic_id=topic_id, partition=partition, uuid=b"u" * 16, length=len(body))
    request = pb.RequestHeader(correlation_id=correlation_id, stage=pb.StageRequest(partitions=[part]))
    return frames.frame_start(request.SerializeToString(), len(body)) + body


def fetch_frame(
    correlation_id: int,
    topic_id: bytes,
    offset: int,
    *,
    partition: int = 0,
    max_wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 1 << 20,
    hint: pb.PositionHint | None = None,
) -> bytes:
    part = pb.FetchPartition(topic_id=topic_id, partition=partition, offset=offset, max_bytes=max_bytes, hint=hint)
    request = pb.FetchRequest(max_wait_ms=max_wait_ms, min_bytes=min_bytes, max_bytes=max_bytes, partitions=[part])
    header = pb.RequestHeader(correlation_id=correlation_id, fetch=request).SerializeToString()
    return frames.frame_start(header, 0)


def ask_for_more_than_sockets_hold(client: DataPortClient, topic_id: bytes) -> None:
    """Have a broker answer so much that it can send no more until some of it is read: 128 MiB."""
    for _ in range(4):
        client.append(topic_id, a_batch([bytes(4 << 20)]))
    for number in range(8):
        client.send(fetch_frame(number, topic_id, 0, max_bytes=16 << 20))


class DataPortClient:
    """One connection. Every read has a limit of 30 s, so that a hang is a failure."""

    def __init__(self, port: int, host: str = "127.0.0.1", *, greet: bool = True) -> None:
        self.sock = socket.create_connection((host, port), timeout=30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if greet:
            self.send(frames.hello())
            assert frames.check_hello(self.read(frames.HELLO_SIZE), "broker") == PROTOCOL.newest

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def read(self, count: int) -> bytes:
        """Exactly so many bytes; fewer only at the end of the stream."""
        parts = []
        while count and (part := self.sock.recv(min(count, 1 << 20))):
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def reply(self) -> tuple[pb.ReplyHeader, bytes]:
        """The next reply and its body; ConnectionError at the end of the stream."""
        prefix = self.read(frames.PREFIX_SIZE)
        if len(prefix) < frames.PREFIX_SIZE:
            raise ConnectionError("the broker closed the connection")
        header_length, body_length = frames.PREFIX.unpack(prefix)
        header = pb.ReplyHeader.FromString(self.read(header_length))
        body = self.read(body_length)
        assert len(body) == body_length, "the body ended early"
        return header, body

    def append(self, topic_id: bytes, body: bytes, **options: int) -> pb.AppendedPartition:
        """Append and wait for the answer of the only partition."""
        self.send(append_frame(1, topic_id, body, **options))
        header, _ = self.reply()
        assert header.WhichOneof("reply") == "append", header
        return header.append.partitions[0]

    def fetch(self, topic_id: bytes, offset: int, **options: Any) -> tuple[pb.FetchedPartition, bytes]:
        self.send(fetch_frame(2, topic_id, offset, **options))
        header, body = self.reply()
        assert header.WhichOneof("reply") == "fetch", header
        return header.fetch.partitions[0], body

    def is_closed(self) -> bool:
        """Whether the broker has closed the connection; waits for it. What it still sends is dropped."""
        try:
            while self.sock.recv(1 << 20):
                pass
            return True
        except TimeoutError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
