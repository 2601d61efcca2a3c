"""Makes the golden files that are missing: `python -m tests.golden.make`. A file that is there is never changed: it
stands for all the logs that users have. A new version of a format gets files of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastcrc.crc32 import iscsi as crc32c

from broker.staging.format import BATCH, DROPPED, PartSpec, PreparedSet, encode_set, file_start, frame
from broker.staging.format import PREPARED as PREPARED_KIND
from broker.storage.checkpoint import seal
from broker.storage.index import Damage, Index, Summary, encode_index
from broker.storage.producer_state import Producers
from kafkalog.clock import ManualClock
from kafkalog.format.batch import CODECS, encode_batch, read_header, stamp
from kafkalog.format.columns import columns_from_lists, encode_columns

GOLDEN = Path(__file__).parent

TIME = 1_700_000_000_000_000
HEADERS = [[("trace", b"\x01\x02"), ("empty", None)], None, [], [("é", b"")]]
KEYS = [b"AA", None, b"", b"UA"]
VALUES = [b"first", b"", None, b"\x00\xff" * 40]

BATCHES: dict[str, dict[str, Any]] = {
    "plain": {"values": [b"one", b"two"], "timestamps_us": TIME},
    "one-record": {"values": [b"x"], "timestamps_us": 0},
    "all-columns": {
        "values": VALUES, "timestamps_us": [TIME + 3, TIME - 1, -5, TIME], "keys": KEYS, "headers": HEADERS,
    },
    "all-columns-lz4": {
        "values": VALUES, "timestamps_us": [TIME + 3, TIME - 1, -5, TIME], "keys": KEYS, "headers": HEADERS,
        "codec": "lz4",
    },
    "all-columns-zstd": {
        "values": VALUES, "timestamps_us": [TIME + 3, TIME - 1, -5, TIME], "keys": KEYS, "headers": HEADERS,
        "codec": "zstd",
    },
    "deltas": {"values": VALUES, "timestamps_us": [TIME + 3, TIME - 1, TIME, TIME + (1 << 31) - 2], "keys": KEYS},
    "deltas-zstd": {"values": VALUES, "timestamps_us": [TIME + 3, TIME - 1, TIME, TIME + 9], "codec": "zstd"},
    "idempotent": {"values": [b"v"] * 100, "timestamps_us": TIME, "producer": (1 << 40, 3, (1 << 31) - 50)},
    "staged": {
        "values": [b"s", b"t"], "timestamps_us": TIME, "producer": (1 << 62 | 5, 0, 1), "transaction": (12, 4),
    },
}  # fmt: skip
"""Name -> what is in the file `batch-1-<name>.bin`, stamped with BASE_OFFSET, LEADER_EPOCH and APPEND_TIMESTAMP_US."""
BASE_OFFSET, LEADER_EPOCH, APPEND_TIMESTAMP_US = (1 << 33) + 5, 9, TIME + 1_000_000


def make_batch(
    values: list[bytes | None],
    timestamps_us: list[int] | int,
    keys: list[bytes | None] | None = None,
    headers: list[Any] | None = None,
    codec: str = "none",
    producer: tuple[int, int, int] = (-1, -1, -1),
    transaction: tuple[int, int] = (-1, -1),
) -> bytes:
    columns = columns_from_lists(values, timestamps_us, keys, headers)
    batch = bytearray(
        encode_batch(
            encode_columns(columns.batch, CODECS[codec]),
            codec=CODECS[codec],
            attributes=columns.attributes,
            record_count=len(values),
            min_timestamp_us=columns.min_timestamp_us,
            max_timestamp_us=columns.max_timestamp_us,
            producer_id=producer[0],
            producer_epoch=producer[1],
            base_sequence=producer[2],
            transaction_batch_id=transaction[0],
            part=transaction[1],
        ).tobytes()
    )
    stamp(batch, BASE_OFFSET, LEADER_EPOCH, APPEND_TIMESTAMP_US)
    return bytes(batch)


INDEX_SUMMARY = Summary(
    1000, 250_000, 1900, TIME + 77, TIME, TIME + 5_000_000, 4, (Damage(1100, 1105, 66_000, 66_800),)
)


def make_index() -> Index:
    index = Index(1000, 65_536)
    index.add(1300, 65_600, TIME + 10)
    index.add(1650, 140_000, TIME + 77)
    return index


PRODUCERS_AT = 600


def make_producers() -> Producers:
    producers = Producers("t-0", 5, 1000, ManualClock())
    header = read_header(make_batch(**BATCHES["idempotent"]))
    for number in range(7):  # two more than are remembered
        producers.record(header._replace(base_sequence=100 * number), 500 + 100 * number, TIME + number)
    producers.record(header._replace(producer_id=8, producer_epoch=0), 1200, TIME)
    return producers


def make_producers_with_marks() -> Producers:
    producers = make_producers()
    header = read_header(make_batch(**BATCHES["staged"]))
    for number in (0, 1, 3):
        producers.apply_progress.record(header._replace(base_sequence=number), 1200 + 2 * number, TIME + number)
    return producers


PREPARED = PreparedSet(
    "spark-stream-é", 1 << 62 | 5, 12, bytes(range(16)), 3, (PartSpec(bytes(range(16, 32)), 4, 2, 1000),)
)
STAGED_SALT = 0x0123456789ABCDEF


def make_staged() -> bytes:
    batch, prepared = make_batch(**BATCHES["staged"]), encode_set(PREPARED)
    crc = read_header(batch).crc
    uuid = PREPARED.parts[0].uuid
    return b"".join(
        (
            file_start(STAGED_SALT),
            frame(STAGED_SALT, BATCH, len(batch), 1, uuid, TIME, crc),
            batch,
            frame(STAGED_SALT, PREPARED_KIND, len(prepared), 0, PREPARED.commit_uuid, TIME + 1, crc32c(prepared)),
            prepared,
            frame(STAGED_SALT, DROPPED, 0, 0, PREPARED.commit_uuid, TIME + 2, 0),
        )
    )


LEADER_EPOCHS = {"epochs": [[0, 0], [3, 1200], [4, 1200]], "partition": "flights-0"}
HIGH_WATERMARKS = {"000102030405060708090a0b0c0d0e0f-0": 1200, "000102030405060708090a0b0c0d0e0f-12": 0}
CHECKPOINT = {"partition": "flights-0", "recovery_point": 1900, "recovery_position": 88064, "start_offset": 1010}


def main() -> None:
    wanted = {f"batch-1-{name}.bin": make_batch(**what) for name, what in BATCHES.items()}
    wanted["index-1.bin"] = encode_index(make_index(), INDEX_SUMMARY)
    wanted["checkpoint-3.txt"] = seal(CHECKPOINT)
    wanted["leader-epochs-1.txt"] = seal(LEADER_EPOCHS)
    wanted["high-watermarks-1.txt"] = seal(HIGH_WATERMARKS)
    wanted["producers-2.bin"] = make_producers_with_marks().snapshot(PRODUCERS_AT).encode()
    wanted["staged-1.bin"] = make_staged()
    for name, data in wanted.items():
        if not (GOLDEN / name).exists():
            (GOLDEN / name).write_bytes(data)


if __name__ == "__main__":
    main()
