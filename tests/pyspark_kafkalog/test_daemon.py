"""The daemon of Spark's Python workers, called as Spark calls it: what is printed when Spark ends one."""

from __future__ import annotations

import importlib.util
import os
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pyspark
import pytest

from broker.local import LocalCluster
from kafkalog import Admin
from tests.waiting import waited_for

ROOT = Path(__file__).resolve().parents[2]
OURS, PYSPARKS = "pyspark_kafkalog.daemon", "pyspark.daemon"
END_OF_STREAM = -4
ARCHIVES = sorted(Path(pyspark.__file__).parent.glob("python/lib/*.zip"))


@pytest.fixture
def folder() -> Iterator[str]:
    """For a Unix socket, whose path has 108 bytes at most: `tmp_path` may be too long."""
    with TemporaryDirectory() as short:
        yield short


@contextmanager
def worker(folder: str, daemon: str, job: str) -> Iterator[tuple[socket.socket, Callable[[], str]]]:
    """A connection to a new worker of a daemon, and what closes it: it returns what was printed until all had ended."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": folder,
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        "SPARK_REUSE_WORKER": "1",
    }
    command = [sys.executable, "-m", daemon, f"pyspark.sql.worker.{job}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        given, told, complaints = process.stdin, process.stdout, process.stderr
        assert given is not None and told is not None and complaints is not None
        [length] = struct.unpack("!i", told.read(4))
        path = told.read(length).decode()
        with socket.socket(socket.AF_UNIX) as spark:
            spark.connect(path)
            assert len(spark.recv(4)) == 4  # the worker's process id: it is there

            def printed() -> str:
                spark.close()
                workers = Path(f"/proc/{process.pid}/task/{process.pid}/children")
                waited_for(lambda: workers.read_text().strip() == "")
                given.close()
                return complaints.read().decode()

            yield spark, printed


@pytest.mark.parametrize("sent", [b"", struct.pack("!i", 4)])  # it waits for a task, or Spark has enough in one
def test_a_worker_that_spark_has_ended_ends_without_a_word(folder: str, sent: bytes) -> None:
    with worker(folder, OURS, "create_data_source") as (spark, printed):
        spark.sendall(sent)
        assert printed() == ""


@pytest.mark.parametrize("daemon", [OURS, PYSPARKS])
def test_a_worker_that_has_looked_for_data_sources_ends_without_a_word(folder: str, daemon: str) -> None:
    with worker(folder, daemon, "lookup_data_sources") as (spark, printed):
        texts = ["{}.{}".format(*sys.version_info), folder]
        request = b"".join(struct.pack("!i", len(text)) + text.encode() for text in texts)
        spark.sendall(request + struct.pack("!i?iii", 0, False, 0, 0, END_OF_STREAM))
        with spark.makefile("rb") as answer:

            def number() -> int:
                return int(struct.unpack("!i", answer.read(4))[0])

            found = [(answer.read(number()), answer.read(number()))[0] for _ in range(number())]
            assert b"kafkalog" in found
            for _ in range(number()):  # what it has counted
                answer.read(number())
            assert number() == END_OF_STREAM
        assert printed() == ""


def in_a_process_of_its_own(code: str, *arguments: str) -> str:
    """What it prints."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, ARCHIVES)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_daemon_has_imported_works_in_a_fork_and_costs_it_no_look_at_archives() -> None:
    assert ARCHIVES, "Spark puts its own archives on the path of a worker"
    in_a_process_of_its_own(
        """
        import importlib, os, sys, zipimport
        from pyspark_kafkalog.daemon import AHEAD, import_ahead

        import_ahead()
        assert set(AHEAD) <= set(sys.modules)
        read = []
        zipimport._read_directory = read.append
        pid = os.fork()
        if pid == 0:
            importlib.invalidate_caches()  # as PySpark has each new worker do
            assert not read
            import numpy as np
            import pyarrow as pa
            import pyarrow.compute as pc

            assert pc.sum(pc.cast(pa.nulls(3, pa.int64()).fill_null(2), pa.int32())).as_py() == 6
            assert (np.ones((200, 200)) @ np.ones((200, 200)))[0, 0] == 200
            import grpc

            grpc.insecure_channel("127.0.0.1:1").close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        """
    )


def test_a_task_imports_no_pandas(cluster: LocalCluster, admin: Admin, topic: str) -> None:
    """It takes 0.4 s in each new worker."""
    assert importlib.util.find_spec("pandas") is not None
    admin.create_topic(topic, partitions=3)
    read = in_a_process_of_its_own(
        """
        import sys
        import numpy as np
        import pyarrow as pa
        from kafkalog.format.columns import binary_array, integer_array
        from pyspark.sql.types import *
        from pyspark_kafkalog.sink import BatchWriter
        from pyspark_kafkalog.source import BatchReader

        servers, topic = {"kafkalog.bootstrap.servers": sys.argv[1]}, sys.argv[2]
        numbers = binary_array(pa.binary(), [b"%d" % each for each in range(100)])
        times = integer_array(pa.timestamp("us", "UTC"), np.arange(100))
        rows = pa.RecordBatch.from_arrays([numbers, numbers, times], names=["key", "value", "timestamp"])
        fields = [("key", BinaryType()), ("value", BinaryType()), ("timestamp", TimestampType())]
        written = StructType([StructField(name, kind) for name, kind in fields])
        sink = BatchWriter(written, {**servers, "topic": topic, "delivery": "at-least-once"}, overwrite=False)
        sink.write(iter([rows]))
        fields += [("topic", StringType()), ("partition", IntegerType()), ("offset", LongType())]
        fields += [("timestampType", IntegerType())]
        schema = StructType([StructField(name, kind) for name, kind in fields])
        source = BatchReader(schema, {**servers, "subscribe": topic})
        print(sum(batch.num_rows for split in source.partitions() for batch in source.read(split)))
        assert "pandas" not in sys.modules
        """,
        cluster.bootstrap_servers,
        topic,
    )
    assert read == "100\n"


def test_what_cannot_be_imported_or_prints_does_not_end_the_daemon(tmp_path: Path) -> None:
    """Its stdout is where Spark reads its port, and a daemon that ends takes all tasks in Python with it."""
    (tmp_path / "pyarrow.py").write_text("print('loud')\nraise AttributeError('of another version')")
    said = in_a_process_of_its_own(
        """
        import random, sys

        sys.path.insert(0, sys.argv[1])
        from pyspark_kafkalog.daemon import import_ahead

        import_ahead()
        print("port")
        """,
        str(tmp_path),
    )
    assert said == "port\n"


def test_workers_draw_different_random_numbers() -> None:
    said = in_a_process_of_its_own(
        """
        import os
        import numpy.random
        from pyspark_kafkalog.daemon import import_ahead

        import_ahead()
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                os.write(1, b"%d\\n" % numpy.random.randint(1 << 60))
                os._exit(0)
            os.waitpid(pid, 0)
        """
    )
    assert len(set(said.split())) == 2
