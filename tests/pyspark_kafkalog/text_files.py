"""A folder of text files as a stream's source: one file for each micro-batch, whenever a test wants one."""

from __future__ import annotations

import os
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession


class TextFiles:
    """Args: folder: one that is there, to put them in."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark, self._folder = spark, folder / "input"
        self._folder.mkdir()

    def add(self, *lines: str) -> None:
        """Lines for a micro-batch of their own."""
        number = len(list(self._folder.iterdir()))
        hidden = self._folder.parent / f"{number}.txt"
        hidden.write_text("".join(f"{line}\n" for line in lines))
        os.utime(hidden, (1_700_000_000 + number, 1_700_000_000 + number))  # Spark takes files by their times
        hidden.rename(self._folder / hidden.name)

    def rows(self) -> DataFrame:
        return self._spark.readStream.option("maxFilesPerTrigger", 1).text(str(self._folder))
