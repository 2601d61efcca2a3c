"""Spark's data source and sink for kafkalog: `spark.read.format("kafkalog")` works wherever this package is installed.

PySpark imports every installed `pyspark_*` package to find `DefaultSource`, and one that fails to import hides all
others: so this imports nothing but `datasource.py`, and that nothing heavy.
"""

from pyspark_kafkalog.datasource import KafkalogDataSource as DefaultSource

__all__ = ["DefaultSource"]
