"""Spark batch write: rows a second into four partitions, exactly once and at least once, beside an Arrow writer that
throws the same rows away."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pyspark.sql import DataFrame

from bench.measure import fresh_topic, interleaved, rate, ratio
from bench.spark_session import RUNS, WARMUPS, spark_session
from broker.local import LocalCluster
from kafkalog import Admin

RECORD_BYTES = 200
PARTITIONS = 4
DELIVERIES = ("exactly-once", "at-least-once")


def run(scale: float = 1.0) -> Iterator[dict[str, object]]:
    count = max(40_000, int(5_000_000 * scale))
    with LocalCluster() as cluster, Admin(cluster.bootstrap_servers) as admin, spark_session() as spark:
        rows = spark.range(0, count, 1, PARTITIONS).selectExpr(f"cast(repeat('x', {RECORD_BYTES}) AS binary) AS value")
        into_topic = {"kafkalog.bootstrap.servers": cluster.bootstrap_servers, "topic": "written"}
        times = interleaved(
            {
                **{each: _save(rows, "kafkalog", {**into_topic, "delivery": each}) for each in DELIVERIES},
                "discarded": _save(rows, "memory_benchmark", {}),
            },
            scale,
            runs=RUNS,
            warmups=WARMUPS,
            before=lambda: fresh_topic(admin, cluster, "written", PARTITIONS),
        )
    at_least_once = {
        "at_least_once": round(rate(count, times["at-least-once"])),
        "ratio_to_at_least_once": round(ratio(times["exactly-once"], times["at-least-once"]), 3),
    }
    for delivery, compared in (("exactly-once", at_least_once), ("at-least-once", {})):
        yield {
            "name": f"Spark batch write, {delivery}",
            "value": round(rate(count, times[delivery])),
            "unit": "rows/s",
            "discarding_writer": round(rate(count, times["discarded"])),
            "ratio": round(ratio(times[delivery], times["discarded"]), 3),
            **compared,
            "rows": count,
            "record_bytes": RECORD_BYTES,
        }


def _save(rows: DataFrame, format_name: str, options: dict[str, str]) -> Callable[[], None]:
    return lambda: rows.write.format(format_name).options(**options).mode("append").save()
