"""The job that the test of `foreachBatch` under Spark Connect runs: micro-batches of text files, written by a function.
Prints one line of JSON: for each run of the query what it raised, or null. Its client has no kafkalog.

    python foreach_batch_job.py BOOTSTRAP FOLDER TOPIC sc://HOST:PORT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def run(spark: SparkSession, folder: Path, checkpoint: str, options: dict[str, str], numbered: bool) -> str | None:
    """All that is there, in one micro-batch; what fails the query."""

    def function(rows: DataFrame, batch_id: int) -> None:
        version = {"txnVersion": str(batch_id)} if numbered else {}
        rows.write.format("kafkalog").options(**options, **version).mode("append").save()

    writer = spark.readStream.text(str(folder / "input")).writeStream.foreachBatch(function)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    except Exception as error:
        return str(error)
    return None


def main() -> None:
    from pyspark.sql import SparkSession

    bootstrap, given, topic, remote = sys.argv[1:]
    spark = SparkSession.builder.remote(remote).getOrCreate()
    folder = Path(given)
    (folder / "input").mkdir()
    (folder / "input" / "a").write_text("a\n")
    checkpoints = {name: str(folder / name) for name in ("unnumbered", "unnamed", "named", "new")}
    options = {"kafkalog.bootstrap.servers": bootstrap, "topic": topic}
    app = {**options, "txnAppId": "connect"}

    def named(name: str) -> str | None:
        return run(spark, folder, checkpoints[name], {**app, "checkpointLocation": checkpoints[name]}, numbered=True)

    found = {
        "unnumbered": run(spark, folder, checkpoints["unnumbered"], options, numbered=False),
        "unnamed": run(spark, folder, checkpoints["unnamed"], app, numbered=True),
        "named": named("named"),
    }
    for each in (folder / "named" / "commits").iterdir():  # the micro-batch runs again
        each.unlink()
    found |= {"again": named("named"), "new": named("new")}
    found["id"] = json.loads((folder / "named" / "metadata").read_text())["id"]
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()
