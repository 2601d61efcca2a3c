"""Spark's data source and sink for kafkalog: `spark.read.format("kafkalog")` works wherever this package is installed.

PySpark imports every installed `pyspark_*` package to find `DefaultSource`, and a package that fails to import hides
all others: so this one imports nothing heavy. The processes that plan and commit import it too; this makes them end
silently (`idle_workers.py`).
"""

from pyspark_kafkalog.datasource import KafkalogDataSource as DefaultSource
from pyspark_kafkalog.idle_workers import end_silently
from pyspark_kafkalog.streaming_write import write_stream

end_silently()

__all__ = ["DefaultSource", "write_stream"]
