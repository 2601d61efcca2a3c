"""A Spark driver under fire: `python -m tests.pyspark_kafkalog.fire.job JSON`. Starts Spark and warms it, says `ready`,
waits for `go`, and copies the input topic to the output topic until all of it is copied. Starts the query again when
the process was killed that commits. Ends with 0 when all is copied, with 3 when the query fails otherwise, its sentence
in `failure-N`."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from pyspark_kafkalog.streaming_write import written_by
from tests.java import QUICK
from tests.pyspark_kafkalog.fire.faults import DRIVER, FOLDER, FORMAT, FireSource, FireWriter, crash_marker


def session(config: dict[str, Any]) -> SparkSession:
    builder = SparkSession.builder.appName("fire").config("spark.ui.enabled", "false")
    settings = {
        "spark.master": "local[2,4]",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "512m",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": QUICK,
        "spark.sql.warehouse.dir": f"{config['folder']}/warehouse",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.daemon.module": "tests.pyspark_kafkalog.fire.daemon",
        "spark.sql.streaming.minBatchesToRetain": "1000000",
        f"spark.executorEnv.{FOLDER}": config["folder"],
        f"spark.executorEnv.{DRIVER}": os.environ[DRIVER],
        **config["spark"],
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def main(config: dict[str, Any]) -> int:
    folder, number = Path(config["folder"]), os.environ[DRIVER]
    spark = session(config)
    gateway: Any = spark.sparkContext._gateway
    assert gateway is not None
    pids = folder / f"pids-{number}.new"
    pids.write_text(json.dumps([gateway.proc.pid, os.getpid()]))
    pids.rename(folder / f"pids-{number}")
    spark.dataSource.register(FireSource)
    servers = {"kafkalog.bootstrap.servers": config["servers"]}
    warm = spark.range(0, 4, 1, 2).selectExpr("cast(id AS string) AS value")
    warm.write.format("kafkalog").options(**servers, topic=config["warm"], delivery=config["delivery"]).mode(
        "append"
    ).save()
    print("ready", flush=True)
    if sys.stdin.readline() != "go\n":
        return 1
    threading.Thread(target=_end_with_stdin, args=[gateway.proc], daemon=True).start()
    rows = (
        spark.readStream.format(FORMAT)
        .options(
            **servers,
            subscribe=config["input"],
            startingOffsets="earliest",
            maxOffsetsPerTrigger=str(config["rows_per_batch"]),
        )
        .load()
        .selectExpr(
            "concat_ws('|', partition, offset, reflect('java.util.UUID', 'randomUUID')) AS value",
            f"cast(offset % {config['partitions']} AS int) AS partition",
        )
    )
    options = {**servers, "topic": config["output"], "delivery": config["delivery"]}
    options["checkpointLocation"] = config["checkpoint"]
    if config["by"] == "write_stream":
        writer = written_by(FireWriter(rows.schema, options), rows).options(checkpointLocation=config["checkpoint"])
    else:
        writer = rows.writeStream.format(FORMAT).options(**options)
    last = Path(config["checkpoint"], "commits", str(config["batches"] - 1))
    crashes = _crashes(folder)
    while True:
        query = writer.start()
        try:
            while not last.exists():
                query.awaitTermination(0.05)  # type: ignore[arg-type] # seconds, also parts of one
            query.processAllAvailable()
            query.stop()
            break
        except StreamingQueryException as error:
            # Spark gives a source's process 10 s to start, which a machine under load may not keep.
            if _crashes(folder) == crashes and "failed to connect back" not in str(error):
                (folder / f"failure-{number}").write_text(str(error))
                return 3
            crashes = _crashes(folder)
    spark.stop()
    return 0


def _crashes(folder: Path) -> int:
    """How many of this driver's processes that commit were killed so far, as planned."""
    return len(list(folder.glob(crash_marker(folder, "*").name)))


def _end_with_stdin(java: Any) -> None:
    """Nothing outlives the test that started it."""
    sys.stdin.read()
    java.kill()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
