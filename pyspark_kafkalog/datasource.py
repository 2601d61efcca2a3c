"""The `kafkalog` format: its name and schema; the readers are in `source.py`, the writers in `sink.py`.

Imports only pyspark's base class and `sentences.py` at module level: `pyspark_*` packages are imported at the first use
of any Python data source, and the process of a streaming source has 10 seconds to start, imports included.

When wrong options are reported:

- Options of batch and stream alike: at `load()`. With a schema given by the user, at the first action, because Spark
  does not call the format before.
- Options of batch only or stream only: at the first action or the query's start.
- Options of the sink, and a missing topic that the option topic names: before the first task.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from pyspark_kafkalog.sentences import in_sentences

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from pyspark_kafkalog.sink import BatchWriter, StreamWriter
    from pyspark_kafkalog.source import BatchReader, StreamReader


@in_sentences
class KafkalogDataSource(DataSource):
    """The format `kafkalog`: rows of topics, with the columns and options of Spark's Kafka connector, as its
    `KafkaSourceProvider` (docs/reference/spark-options.md)."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        from pyspark_kafkalog.options import check_names

        self.options = dict(options)  # plain values: this object travels to the tasks
        check_names(self.options)

    @classmethod
    def name(cls) -> str:
        return "kafkalog"

    def schema(self) -> str:
        from pyspark_kafkalog.columns import source_schema
        from pyspark_kafkalog.read.options import parse_source

        options = parse_source(self.options)
        return source_schema(options.include_headers, options.columns)

    def reader(self, schema: StructType) -> BatchReader:
        from pyspark_kafkalog.source import BatchReader

        return BatchReader(schema, self.options)

    def streamReader(self, schema: StructType) -> StreamReader:
        from pyspark_kafkalog.source import StreamReader

        return StreamReader(schema, self.options)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        from pyspark_kafkalog.sink import BatchWriter

        return BatchWriter(schema, self.options, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        from pyspark_kafkalog.sink import StreamWriter

        return StreamWriter(schema, self.options)
