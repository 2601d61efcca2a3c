"""`write_stream`: a stream's write with the guarantees and options of the format's sink, and less processor time
for each micro-batch.

For each micro-batch of a sink in Python, Spark plans the write in one Python process and commits it in another. Here
neither is needed: the tasks of the query's own plan write the rows (`DataFrame.mapInArrow`) and each returns its commit
message as a row, and the process that started the query collects the messages and commits them (`foreachBatch`). Tasks
and commit are those of the sink (`sink.py:StreamWriter`), also the names of transactions: a query may change between
the two with its checkpoint.

Imports nothing heavy: see `__init__.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from pyspark_kafkalog.sink import StreamWriter

_CHECKPOINT = "checkpointLocation"
_CONFIGURED = "spark.sql.streaming.checkpointLocation"


def write_stream(
    df: DataFrame,
    *,
    topic: str | None = None,
    checkpoint_location: str | None = None,
    delivery: str | None = None,
    trigger: Mapping[str, Any] | None = None,
    query_name: str | None = None,
    output_mode: str = "append",
    **options: Any,
) -> StreamingQuery:
    """Start a query that writes a streaming DataFrame to kafkalog. Guarantees and options are those of
    `df.writeStream.format("kafkalog")`; a micro-batch takes less processor time (docs/how-to/tune.md).

    The process that calls it commits the micro-batches. It keeps its connections to the brokers after the query's end.

    Args:
        topic: as the option of that name.
        checkpoint_location: required, unless the session sets spark.sql.streaming.checkpointLocation and the query
            has a name.
        delivery: `exactly-once` (the default) or `at-least-once`.
        trigger: the arguments of `DataStreamWriter.trigger`, as `{"processingTime": "1 second"}`.
        query_name: as `DataStreamWriter.queryName`.
        output_mode: `append`, `complete` or `update`. The sink has no update mode.
        options: of the sink, by the same names; those with dots as `**{"kafkalog.bootstrap.servers": "host:9192"}`.

    Raises:
        InvalidArgument: a wrong option or column, no checkpoint, or Spark Connect.
        UnknownTopic: the topic does not exist.
    """
    from pyspark_kafkalog.options import check_names
    from pyspark_kafkalog.sink import StreamWriter

    _check_classic(df)
    given = _given(options, topic=topic, checkpointLocation=checkpoint_location, delivery=delivery)
    check_names(given)
    given[_CHECKPOINT] = location = _absolute(df, _location(df, given, query_name))
    stream = written_by(StreamWriter(df.schema, given), df).outputMode(output_mode).option(_CHECKPOINT, location)
    if query_name is not None:
        stream = stream.queryName(query_name)
    if trigger is not None:
        stream = stream.trigger(**trigger)
    return stream.start()


def written_by(writer: StreamWriter, df: DataFrame) -> DataStreamWriter:
    """A stream's write by a writer of the format, to be given its checkpoint and started."""
    messages = _picked(df, writer.columns).mapInArrow(partial(_written, writer), "message binary")
    return messages.writeStream.foreachBatch(partial(_commit, writer))


def _written(writer: StreamWriter, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a task: its rows are written, and its message is its only row. Spark hands on the rows of one attempt."""
    import pyarrow as pa

    from kafkalog.format.columns import binary_array

    message = pickle.dumps(writer.write(batches))
    yield pa.RecordBatch.from_arrays([binary_array(pa.binary(), [message])], names=["message"])


def _commit(writer: StreamWriter, rows: DataFrame, batch_id: int) -> None:
    """On the driver: run the tasks of a micro-batch, and commit it."""
    from pyspark_kafkalog.write.exactly_once import read_checkpoint_by

    writer.check()
    messages = [pickle.loads(message) for message in _collected(rows)]
    read_checkpoint_by(rows.sparkSession, messages)
    try:
        writer.commit(messages, batch_id)
    except Exception:
        writer.abort(messages, batch_id)
        raise


def _collected(rows: DataFrame) -> list[bytes]:
    """Run the tasks of a micro-batch and return their messages.

    The rows are an RDD of the query's plan already. `DataFrame.collect` plans them a second time, and hands them over a
    socket of its own; both together take 12 ms more than this.
    """
    found: Any = rows._jdf.queryExecution().logical().rdd().collect()
    return [bytes(row.getBinary(0)) for row in found]


def _check_classic(df: DataFrame) -> None:
    from pyspark.sql import DataFrame
    from pyspark.sql.classic.dataframe import DataFrame as ClassicDataFrame

    from kafkalog.errors import InvalidArgument

    if not isinstance(df, DataFrame):
        raise InvalidArgument(reason=f"write_stream writes a streaming DataFrame, not {df!r:.100}")
    if not isinstance(df, ClassicDataFrame):
        raise InvalidArgument(
            reason="write_stream commits in the driver's process, which Spark Connect does not give: use "
            "df.writeStream.format('kafkalog')"
        )


def _given(options: Mapping[str, Any], **named: str | None) -> dict[str, str]:
    """The options as texts, as Spark hands them to a format."""
    from pyspark.sql.utils import to_str

    from kafkalog.errors import InvalidArgument

    given: dict[str, str] = {}
    for name, value in [*options.items(), *named.items()]:
        text = to_str(value)
        if text is not None:
            if name.lower() in map(str.lower, given):
                raise InvalidArgument(reason=f"the option {name} is given twice")
            given[name] = text
    return given


def _location(df: DataFrame, options: dict[str, str], query_name: str | None) -> str:
    """The checkpoint's, taken out of the options; else, of a query with a name, in the folder that the session names.
    Otherwise Spark gives `foreachBatch` a temporary one, and a query that is started again would write its rows
    again."""
    from kafkalog.errors import InvalidArgument

    name = next((name for name in options if name.lower() == _CHECKPOINT.lower()), None)
    location = "" if name is None else options.pop(name)
    if location:
        return location
    root = df.sparkSession.conf.get(_CONFIGURED, None)
    if not root or query_name is None:
        raise InvalidArgument(
            reason=f"checkpoint_location is missing: give it, or set {_CONFIGURED} and give query_name. A query that "
            "starts again continues from its checkpoint"
        )
    return f"{root.rstrip('/')}/{query_name}"


def _absolute(df: DataFrame, location: str) -> str:
    """A relative path as Spark takes it: from the directory where Java was started. This process commits, and looks
    into the checkpoint; it may have gone elsewhere since."""
    session: Any = df.sparkSession
    path = session._jvm.org.apache.hadoop.fs.Path(location)
    if path.isUriPathAbsolute():
        return location
    hadoop = session._jsparkSession.sessionState().newHadoopConf()
    return str(path.getFileSystem(hadoop).makeQualified(path))


def _picked(df: DataFrame, columns: tuple[str, ...]) -> DataFrame:
    """Only the columns that are written, so that no other goes to the tasks' Python. By their places, for Spark does
    not distinguish names by case, and the format does."""
    others = (f"_{place}" for place in range(len(df.columns)))
    return df.toDF(
        *(name if name in columns else other for name, other in zip(df.columns, others, strict=True))
    ).select(*columns)
