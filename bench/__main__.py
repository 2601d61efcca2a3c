"""Run benchmarks by name (all if none is given) and print one JSON line a figure, or one that says why there is none.

A benchmark is a module of this package with `run(scale: float) -> Iterable[dict]`; `scale` shrinks its record counts,
so that tests can run it small. Every line has the machine and the command; figures are medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterable

from bench.measure import NotAvailable

BENCHMARKS = (
    "producer",
    "consumer",
    "groups",
    "replication",
    "spark_read",
    "spark_write",
    "spark_stream",
    "spark_small",
    "spark_conf",
    "kafka",
    "kafka_replicated",
    "confluent",
    "paper",
)


def machine() -> dict[str, object]:
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            model = next(line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def lines(names: Iterable[str], scale: float) -> Iterable[dict[str, object]]:
    """One dict a figure, of each benchmark in turn."""
    for name in names:
        try:
            for figure in importlib.import_module(f"bench.{name}").run(scale):
                yield {"benchmark": name, **figure, "scale": scale, **machine(), "command": f"./run bench {name}"}
        except NotAvailable as reason:
            yield {"benchmark": name, "skipped": str(reason), "command": f"./run bench {name}"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./run bench", description="Benchmarks; one JSON line a figure.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all if none is given")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full record counts (default 1)")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark '{unknown[0]}'; there are {', '.join(BENCHMARKS)}")
    for line in lines(given.names or BENCHMARKS, given.scale):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
