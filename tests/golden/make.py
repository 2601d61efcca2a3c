"""Makes the golden files that are missing: `python -m tests.golden.make`. A file that is there is never changed: it
stands for all the logs that users have. A new version of a format gets files of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from broker.storage.checkpoint import seal
from broker.storage.index import Damage, Index, Summary, encode_index
from broker.storage.producers import Producers
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
    "idempotent": {"values": [b"v"] * 100, "timestamps_us": TIME, "producer": (1 << 40, 3, (1 << 31) - 50)},
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
    producers = Producers("t-0", 5)
    header = read_header(make_batch(**BATCHES["idempotent"]))
    for number in range(7):  # two more than are remembered
        producers.record(header._replace(base_sequence=100 * number), 500 + 100 * number, TIME + number)
    producers.record(header._replace(producer_id=8, producer_epoch=0), 1200, TIME)
    return producers


CHECKPOINT = {"recovery_point": 1900, "start_offset": 1010}


def main() -> None:
    wanted = {f"batch-1-{name}.bin": make_batch(**what) for name, what in BATCHES.items()}
    wanted["index-1.bin"] = encode_index(make_index(), INDEX_SUMMARY)
    wanted["checkpoint-1.txt"] = seal(CHECKPOINT)
    wanted["producers-1.bin"] = make_producers().encode(PRODUCERS_AT)
    for name, data in wanted.items():
        if not (GOLDEN / name).exists():
            (GOLDEN / name).write_bytes(data)


if __name__ == "__main__":
    main()
