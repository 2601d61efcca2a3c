"""Run benchmarks by name (all if none is given) and print one JSON line a figure, or one that says why there is none.

`--peers` runs those that are published, keeps their figures in docs/benchmarks/results.json, and makes the plots and
the tables of docs/BENCHMARKS.md again.

A benchmark is a module of this package with `run(scale: float) -> Iterable[dict]`; `scale` shrinks its record counts,
so that tests can run it small. Every line has the command and the commit, and each figure the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import psutil

from bench import report
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
    "kafka_stream",
    "kafka_replicated",
    "confluent",
    "paper",
    "retained",
    "scale",
    "durable",
    "start",
)

_FREE_BYTES = 45e9


def machine() -> dict[str, object]:
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            model = next(line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    memory = round(psutil.virtual_memory().total / 1e9)
    return {"cpu": model, "cores": os.cpu_count(), "memory_gb": memory, "python": platform.python_version()}


def code() -> str:
    """The commit that is measured; with `+` if files differ from it, but for the documents, which a run changes."""
    git = ["git", "-C", str(report.ROOT)]
    try:
        commit, changed = (
            subprocess.run([*git, *asked], capture_output=True, text=True, check=True).stdout.strip()
            for asked in (("describe", "--always", "--exclude=*"), ("status", "--porcelain", "--", ".", ":!docs"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + "+" * bool(changed)


def lines(name: str, scale: float, how: str = "") -> Iterable[dict[str, object]]:
    """One dict a figure of a benchmark; `how` is what was given before its name."""
    of_run = {"date": time.strftime("%Y-%m-%d"), "command": f"./run bench {how}{name}", "code": code()}
    try:
        for figure in importlib.import_module(f"bench.{name}").run(scale):
            yield {"benchmark": name, **figure, "scale": scale, **machine(), **of_run}
    except NotAvailable as reason:
        yield {"benchmark": name, "skipped": str(reason), **of_run}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./run bench", description="Benchmarks; one JSON line a figure.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all if none is given")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full record counts (default 1)")
    parser.add_argument(
        "--peers",
        action="store_true",
        help=f"those that are published, or some of them ({', '.join(report.PEERS)}), at full size; keep their "
        "figures, and make the plots and tables of docs/BENCHMARKS.md again",
    )
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark '{unknown[0]}'; there are {', '.join(BENCHMARKS)}")
    if given.peers and given.scale != 1.0:
        parser.error("--peers publishes its figures, so they are of the full record counts: leave out --scale")
    unpublished = [name for name in given.names if given.peers and name not in report.PEERS]
    if unpublished:
        parser.error(f"no page shows the figures of '{unpublished[0]}'; --peers is for {', '.join(report.PEERS)}")
    if given.peers and (lacks := _lacks()):
        parser.error(lacks)
    failed = False
    for name in given.names or (report.PEERS if given.peers else BENCHMARKS):
        measured = []
        try:
            for line in lines(name, given.scale, "--peers " if given.peers else ""):
                print(json.dumps(line), flush=True)
                measured.append(line)
        except Exception:  # whatever its peers do: it is printed, and those that follow are measured
            print(f"bench: {name} has failed; its figures are not kept", file=sys.stderr)
            traceback.print_exc()
            failed = True
            continue
        if given.peers:
            publish(measured)
    return 1 if failed else 0


def _lacks() -> str | None:
    """Why what is published cannot be measured here, if so."""
    folder = Path(tempfile.gettempdir())
    mounts = [each for each in psutil.disk_partitions(all=True) if folder.is_relative_to(each.mountpoint)]
    if max(mounts, key=lambda each: len(each.mountpoint)).fstype == "tmpfs":
        return f"{folder} is in memory, and the disk has to take what is written: set TMPDIR to a folder on one"
    if (free := psutil.disk_usage(str(folder)).free) < _FREE_BYTES:
        return (
            f"{folder} has {free / 1e9:.0f} GB free, of {_FREE_BYTES / 1e9:.0f} that are needed: set TMPDIR to another"
        )
    return None


def publish(measured: list[dict[str, object]]) -> None:
    """Keep a benchmark's figures, and make plots and tables again."""
    from bench import plots
    from docs import generate

    if not report.keep(measured):
        missing = "; ".join(str(line["skipped"]) for line in measured if "skipped" in line)
        print(f"bench: the figures of before stay, which have those of all peers: {missing}", file=sys.stderr)
    plots.draw()
    generate.main()


if __name__ == "__main__":
    sys.exit(main())
