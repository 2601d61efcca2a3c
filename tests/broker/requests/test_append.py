"""The append request over real partitions, without a port: what is checked, grouped and promised."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastcrc.crc32 import iscsi as crc32c

from broker.replica.ack import Ack
from broker.replica.partition import Partition
from broker.requests.append import Call, ack_reply, checked
from broker.requests.append import append as append_in
from broker.storage.log_dir import LogDirectory
from kafkalog import errors
from kafkalog.format.batch import CODECS, HEADER_SIZE, encode_batch
from kafkalog.format.columns import (
    HAS_OFFSET,
    HAS_TIMESTAMP,
    HAS_TIMESTAMP_DELTA,
    columns_from_lists,
    encode_columns,
)
from kafkalog.wire import dataport_pb2 as pb
from kafkalog.wire.frames import error_from_wire
from tests.broker.data_port_client import a_batch
from tests.broker.requests.hosted import TOPIC_ID, Hosted


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[LogDirectory]:
    opened = LogDirectory(tmp_path / "data")
    yield opened
    opened.close()


def call_of(*parts: tuple[int, bytes], acks: int = 1, extra: bytes = b"") -> Call:
    request = pb.AppendRequest(acks=acks, timeout_ms=70)
    for number, body in parts:
        request.partitions.add(topic_id=TOPIC_ID, partition=number, length=len(body))
    return Call(request, memoryview(bytearray(b"".join(body for _, body in parts) + extra)))


def append(calls: list[Call], hosted: Hosted) -> None:
    host: Any = hosted
    append_in(calls, host)


def base_offset(call: Call, index: int = 0) -> int:
    result = call.results[index]
    assert isinstance(result, tuple), result
    return result[0]


def with_valid_checksum(batch: bytes) -> bytes:
    """A batch whose content was changed by someone who knows how to checksum it."""
    return batch[:28] + crc32c(batch[32:]).to_bytes(4, "little") + batch[32:]


@pytest.mark.parametrize(
    ("codec", "limit", "records_max"),
    [("lz4", 40_000, 10_000), ("zstd", 40_000, 10_000)],
)
def test_a_compressed_batch_of_more_records_than_fit_uncompressed_is_refused(
    directory: LogDirectory, codec: str, limit: int, records_max: int
) -> None:
    hosted = Hosted(directory, **{"max.message.bytes": limit})

    def counting(records: int) -> bytes:
        return encode_batch(
            memoryview(bytes(64)), codec=CODECS[codec], attributes=0, record_count=records, min_timestamp_us=0,
            max_timestamp_us=0,
        ).tobytes()  # fmt: skip

    too_many, enough = call_of((0, counting(records_max + 1))), call_of((1, counting(records_max)))
    append([too_many, enough], hosted)
    refused = too_many.failed()
    assert isinstance(refused, errors.InvalidRequest)
    assert f"compressed batch for t-0 has {records_max + 1} records" in str(refused)
    assert enough.failed() is None


def test_calls_of_one_wake_up_are_one_write_for_each_partition(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = Hosted(directory)
    for partition in hosted.partitions:
        partition.log.begin_epoch(0)  # saves the epoch, which the first append would do otherwise
    writes: list[int] = []
    real_write = directory.disk.write
    monkeypatch.setattr(
        directory.disk,
        "write",
        lambda fd, buffers, position: writes.append(len(buffers)) or real_write(fd, buffers, position),
    )
    calls = [call_of((number % 2, a_batch([b"%d" % number]))) for number in range(10)]
    calls.append(call_of((0, a_batch([b"x"]) + a_batch([b"y", b"z"])), (1, a_batch())))
    append(calls, hosted)
    assert sorted(writes) == [6, 7]
    assert [base_offset(call) for call in calls] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert base_offset(calls[-1], 1) == 5
    assert hosted.partitions[0].log.end_offset == 8
    reply = ack_reply(calls[-1])
    assert [part.base_offset for part in reply.partitions] == [5, 5]
    assert all(part.append_timestamp_us > 0 for part in reply.partitions)


def test_a_batch_that_no_producer_may_send_is_refused_with_what_is_wrong(directory: LogDirectory) -> None:
    hosted = Hosted(directory)
    good = a_batch([b"value"] * 3)
    refused = {
        "its records are not consecutive": with_valid_checksum(good[:44] + (3).to_bytes(4, "little") + good[48:]),
        "it has its own offsets; only the leader assigns offsets": with_valid_checksum(
            good[:34] + b"\x08\x00" + good[36:]
        ),
        "its smallest and largest timestamps differ, but it has no column of timestamps": with_valid_checksum(
            good[:56] + b"\xff" * 7 + b"\0" + good[64:]
        ),
        "it has no body": encode_batch(
            memoryview(b""), codec=CODECS["lz4"], attributes=0, record_count=1, min_timestamp_us=0, max_timestamp_us=0
        ).tobytes(),
        "producer 1, epoch 0 and sequence -1 must all be >= 0": a_batch(producer_id=1, producer_epoch=0),
        "producer 2, epoch -1 and sequence 0 must all be >= 0": a_batch(producer_id=2, base_sequence=0),
        "producer -5, epoch 0 and sequence 0 must all be >= 0": a_batch(
            producer_id=-5, producer_epoch=0, base_sequence=0
        ),
    }
    calls = [call_of((0, batch)) for batch in refused.values()]
    calls += [call_of((0, a_batch(transaction_batch_id=0))), call_of((0, a_batch(part=0)))]
    calls.append(call_of((0, good[:-1])))
    append(calls, hosted)
    reasons = [error.facts["reason"] for call in calls if (error := call.failed())]
    staged = [
        f"it has transaction batch {each}; send it as a stage request, not as an append"
        for each in ("0 and part -1", "-1 and part 0")
    ]
    assert reasons == [*refused, *staged, f"only {len(good) - 1} of its {len(good)} bytes were sent"]
    assert hosted.partitions[0].log.end_offset == 0


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ({"producer_id": 1, "transaction_batch_id": 0}, "1, 0 and -1"),
        ({"producer_id": 1, "part": 0}, "1, -1 and 0"),
        ({"transaction_batch_id": 0, "part": 0}, "-1, 0 and 0"),
    ],
)
def test_a_staged_batch_names_its_producer_its_batch_and_its_part(
    directory: LogDirectory, header: dict[str, Any], names: str
) -> None:
    [partition, _] = Hosted(directory).partitions
    sequence: dict[str, Any] = {"producer_epoch": 0, "base_sequence": 0} if "producer_id" in header else {}
    with pytest.raises(
        errors.CorruptBatch, match=f"a staged batch needs producer id, batch id and part >= 0, not {names}"
    ):
        checked(memoryview(bytearray(a_batch(**sequence, **header))), partition, staged=True)


def test_a_batch_may_be_as_large_as_max_message_bytes(directory: LogDirectory) -> None:
    batch = a_batch([bytes(5000)])
    hosted = Hosted(directory, **{"max.message.bytes": len(batch)})
    larger = a_batch([bytes(5100)])
    calls = [call_of((0, batch)), call_of((0, larger))]
    append(calls, hosted)
    assert calls[0].failed() is None
    refused = calls[1].failed()
    assert isinstance(refused, errors.BatchTooLarge)
    assert refused.facts == {"size": len(larger), "partition": "t-0", "limit": len(batch)}


def test_an_acks_that_there_is_not_is_refused_with_what_there_is(directory: LogDirectory) -> None:
    hosted = Hosted(directory)
    calls = [call_of((0, a_batch()), acks=-2), call_of((0, a_batch()), acks=2)]
    append(calls, hosted)
    assert [str(call.failed()) for call in calls] == [
        f"acks={acks} is not supported: it must be 0 (no answer), 1 (the leader has it) or -1 (all in-sync replicas "
        "have it)"
        for acks in (-2, 2)
    ]


def test_an_answer_says_from_where_on_the_log_has_records(directory: LogDirectory) -> None:
    hosted = Hosted(directory)
    append([call_of((0, a_batch([b"1", b"2"])))], hosted)
    hosted.partitions[0].log.delete_before(1)
    call = call_of((0, a_batch()), (1, a_batch()))
    append([call], hosted)
    assert [part.log_start_offset for part in ack_reply(call).partitions] == [1, 0]


def test_the_ack_of_several_batches_waits_for_the_last_of_them(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = Hosted(directory, **{"flush.messages": 1})
    call = call_of((0, a_batch() + a_batch()))
    append([call], hosted)
    asked: list[int] = []
    monkeypatch.setattr(Partition, "keeps", lambda self, ack: asked.append(ack.end_offset) or False)
    assert not call.is_acked()
    assert asked == [2]


def test_a_defect_of_a_check_is_an_error_of_its_partition_only(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosted = Hosted(directory)
    monkeypatch.setattr(hosted.partitions[0], "settings", None)
    call = call_of((0, a_batch()), (1, a_batch()))
    append([call], hosted)
    assert isinstance(call.results[0], errors.InternalError)
    assert base_offset(call, 1) == 0
    assert "append_failed partition=" in caplog.text


def test_a_refused_call_does_not_take_the_others_with_it(directory: LogDirectory) -> None:
    hosted = Hosted(directory)
    calls = [
        call_of((0, a_batch())),
        call_of(),
        call_of((0, a_batch()), extra=b"?"),
        call_of((0, a_batch()), (1, a_batch()), extra=b"?"),
        call_of((0, a_batch()), acks=2),
        call_of((0, a_batch())),
    ]
    append(calls, hosted)
    kinds = [type(call.failed()) for call in calls]
    assert kinds == [
        type(None),
        errors.InvalidRequest,
        errors.InvalidRequest,
        errors.InvalidRequest,
        errors.UnsupportedAcks,
        type(None),
    ]
    assert base_offset(calls[5]) == 1
    reply = ack_reply(calls[3])
    assert len(reply.partitions) == 2  # an error for each
    assert isinstance(error_from_wire(reply.partitions[1].error), errors.InvalidRequest)


def test_an_arrow_body_that_is_none_is_refused_though_its_checksum_is_right(directory: LogDirectory) -> None:
    hosted = Hosted(directory)
    good = a_batch([b"value"] * 3)
    liars = {
        "noise": with_valid_checksum(good[:HEADER_SIZE] + bytes(len(good) - HEADER_SIZE)),
        "records": with_valid_checksum(good[:40] + (9).to_bytes(4, "little") + (8).to_bytes(4, "little") + good[48:]),
        "version": with_valid_checksum(good[:32] + b"\x07" + good[33:]),
        "codec": with_valid_checksum(good[:33] + b"\x09" + good[34:]),
        "attributes": with_valid_checksum(good[:34] + b"\x08\x00" + good[36:]),
        "columns": with_valid_checksum(good[:34] + b"\x02\x00" + good[36:]),
        "transaction": with_valid_checksum(good[:78] + bytes(8) + good[86:]),
        "timestamps": with_valid_checksum(good[:56] + (1 << 40).to_bytes(8, "little") + good[64:]),
    }
    calls = [call_of((0, liar)) for liar in liars.values()]
    append(calls, hosted)
    refused = {name: type(call.failed()) for name, call in zip(liars, calls, strict=True)}
    assert refused == dict.fromkeys(liars, errors.CorruptBatch)
    assert hosted.partitions[0].log.end_offset == 0


@pytest.mark.parametrize("codec", list(CODECS))
@pytest.mark.parametrize(
    ("attributes", "span", "sentence"),
    [
        (HAS_TIMESTAMP_DELTA, 1 << 31, "its timestamps span 2147483648 us, too much for deltas of 32 bits"),
        (HAS_TIMESTAMP_DELTA | HAS_TIMESTAMP, 9, "it has timestamps and deltas of timestamps; it may have one of them"),
        (HAS_TIMESTAMP_DELTA | HAS_OFFSET, 9, "it has its own offsets; only the leader assigns offsets"),
        (0, 9, "its smallest and largest timestamps differ, but it has no column of timestamps"),
    ],
)
def test_a_header_that_says_what_no_timestamps_can_be_is_refused_whatever_the_codec(
    directory: LogDirectory, codec: str, attributes: int, span: int, sentence: str
) -> None:
    hosted = Hosted(directory)
    body = encode_columns(columns_from_lists([b"v"] * 2, [0, 9]).batch, CODECS[codec])
    batch = encode_batch(
        body, codec=CODECS[codec], attributes=attributes, record_count=2, min_timestamp_us=0, max_timestamp_us=span
    )
    call = call_of((0, batch.tobytes()))
    append([call], hosted)
    error = call.failed()
    assert isinstance(error, errors.CorruptBatch) and error.facts["reason"] == sentence


def test_deltas_that_the_header_does_not_agree_with_are_refused_and_those_of_a_producer_are_not(
    directory: LogDirectory,
) -> None:
    hosted = Hosted(directory)
    columns = columns_from_lists([b"v"] * 3, [100, 107, 103])
    assert columns.attributes == HAS_TIMESTAMP_DELTA

    def batch_of(low: int, high: int) -> bytes:
        body = encode_columns(columns.batch, 0)
        return encode_batch(
            body, codec=0, attributes=columns.attributes, record_count=3, min_timestamp_us=low, max_timestamp_us=high
        ).tobytes()

    calls = [call_of((0, batch_of(low, high))) for low, high in ((100, 107), (100, 108), (100, 106), (101, 107))]
    append(calls, hosted)
    failures = [call.failed() for call in calls]
    assert [failure and failure.facts["reason"] for failure in failures] == [
        None,
        *(f"its timestamps' deltas are 0 to 7; by its header's timestamps they are 0 to {span}" for span in (8, 6, 6)),
    ]
    assert hosted.partitions[0].log.end_offset == 3


def test_the_first_error_of_several_batches_is_reported_and_those_before_it_stay(directory: LogDirectory) -> None:
    hosted = Hosted(directory)

    def numbered(sequence: int) -> bytes:
        return a_batch(producer_id=1, producer_epoch=0, base_sequence=sequence)

    call = call_of((0, numbered(0) + numbered(1) + numbered(5)))
    append([call], hosted)
    assert isinstance(call.failed(), errors.OutOfOrderSequence)
    assert hosted.partitions[0].log.end_offset == 2
    again = call_of((0, numbered(0) + numbered(1) + numbered(2)))
    append([again], hosted)
    assert base_offset(again) == 0  # where it stood the first time
    assert hosted.partitions[0].log.end_offset == 3


def test_with_flush_messages_1_a_call_is_acked_once_its_partitions_are_flushed(directory: LogDirectory) -> None:
    hosted = Hosted(directory, **{"flush.messages": 1})
    call = call_of((0, a_batch()), (1, a_batch()))
    unacked = call_of((0, a_batch()), acks=0)
    append([call, unacked], hosted)
    assert not call.is_acked()
    assert unacked.is_acked()  # nobody waits for it
    assert call.waiting_at() == hosted.partitions
    hosted.partitions[0].log.flush()
    assert not call.is_acked()
    late = ack_reply(call)
    assert not late.partitions[0].HasField("error")
    assert "the fdatasync of t-1" in str(error_from_wire(late.partitions[1].error))
    hosted.partitions[1].log.flush()
    assert call.is_acked()
    assert not ack_reply(call).partitions[1].HasField("error")


def test_a_defect_below_is_an_error_of_its_partition_only(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosted = Hosted(directory)
    monkeypatch.setattr(hosted.partitions[0].log, "append", lambda batches, leader_epoch: 1 // 0)
    call = call_of((0, a_batch()), (1, a_batch()))
    append([call], hosted)
    assert isinstance(call.results[0], errors.InternalError)
    assert base_offset(call, 1) == 0
    assert "append_failed partition=t-0" in caplog.text


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_body_is_let_go_at_once_also_after_an_error(directory: LogDirectory, spoiled: bool) -> None:
    hosted = Hosted(directory)
    body = memoryview(bytearray(bytes(1000) if spoiled else a_batch()))
    held = weakref.ref(body)
    part = pb.AppendPartition(topic_id=TOPIC_ID, partition=0, length=len(body))
    gc.disable()  # a cycle would keep the memory of a whole receive buffer until the collector runs
    try:
        call = Call(pb.AppendRequest(acks=1, partitions=[part]), body)
        del body
        append([call], hosted)
        assert held() is None
        assert (call.failed() is not None) == spoiled
    finally:
        gc.enable()


def test_when_the_time_is_up_a_late_partition_is_no_matter_of_those_behind_it(directory: LogDirectory) -> None:
    """They were answered RequestTimedOut, too, and a client without sequence numbers sent them again."""
    hosted = Hosted(directory, **{"flush.messages": 1})
    call = call_of((0, a_batch()), (1, a_batch()))
    append([call], hosted)
    hosted.partitions[1].log.flush()
    assert not call.is_acked()
    late, kept = ack_reply(call).partitions
    assert isinstance(error_from_wire(late.error), errors.RequestTimedOut)
    assert (kept.base_offset, kept.HasField("error")) == (0, False)


@pytest.mark.parametrize("moved", [0, 1])
def test_a_partition_whose_promise_cannot_be_kept_any_more_is_not_acknowledged(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    """As one whose leader has changed: it stands before or behind one that still waits."""
    hosted = Hosted(directory, **{"flush.messages": 1})
    call = call_of((0, a_batch()), (1, a_batch()))
    append([call], hosted)
    real = Ack.is_kept

    def is_kept(ack: Ack) -> bool:
        if ack.partition is hosted.partitions[moved]:
            raise errors.NotLeader(broker_id=0, partition="t")
        return real(ack)

    monkeypatch.setattr(Ack, "is_kept", is_kept)
    assert not call.is_acked()
    answers = ack_reply(call).partitions
    assert isinstance(error_from_wire(answers[1 - moved].error), errors.RequestTimedOut)
    assert answers[moved].HasField("error")
    assert not isinstance(error_from_wire(answers[moved].error), errors.RequestTimedOut)


def test_no_client_waits_for_an_ack_longer_than_the_broker_does() -> None:
    for asked, given in ((0, 30_000), (70, 70), (10**9, 30_000)):
        assert Call(pb.AppendRequest(timeout_ms=asked), memoryview(b"")).timeout_ms == given
