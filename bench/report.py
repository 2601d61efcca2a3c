"""The figures of `./run bench --peers` as they are kept (docs/benchmarks/results.json) and as tables. Pure, but for
reading and writing that file; `plots.py` draws them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.goals import Reached, by_name, reached

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks" / "results.json"
PEERS = (
    "paper",
    "confluent",
    "kafka",
    "kafka_stream",
    "spark_stream",
    "retained",
    "scale",
    "durable",
    "start",
    "kafka_replicated",
)
"""What `--peers` runs: the benchmarks of `bench/goals.py`, and what else docs/BENCHMARKS.md shows."""
PLOTS = {
    "goals": "what was measured, as a share of the goal",
    "produce": "messages of 200 bytes a second that one producer sends (the paper's figure 4)",
    "consume": "messages of 200 bytes a second that one consumer reads (the paper's figure 5)",
    "spark-read": "rows a second that Spark reads",
    "spark-write": "rows a second that Spark writes",
    "latency": "ms from scheduled send to consumer, through a Spark stream",
    "durable": "records a second, each acknowledged after a sync",
    "scale": "records a second, by partitions, bytes of a record, and clients",
}
"""Titles of what `plots.py` draws, by the names of the files."""
_OF_THE_RUN = ("cpu", "cores", "memory_gb", "python", "scale", "date", "command", "code")
_NOT_SHOWN = {"benchmark", "name", "value", "unit", "each", *_OF_THE_RUN}

Line = Mapping[str, Any]


def kept() -> list[dict[str, Any]]:
    """The lines of the last run of each benchmark."""
    return list(json.loads(RESULTS.read_text())) if RESULTS.exists() else []


def keep(lines: Iterable[Line]) -> bool:
    """Keep the lines of a benchmark's run in place of those before, unless a peer is missing (a machine without network
    has none) that was there before. Returns whether they are kept."""
    new = list(lines)
    names = {line["benchmark"] for line in new}
    before = [line for line in kept() if line["benchmark"] in names]
    missing = {line.get("name") for line in new if "skipped" in line}
    if missing - {line.get("name") for line in before if "skipped" in line} and any("value" in line for line in before):
        return False
    RESULTS.parent.mkdir(exist_ok=True)
    lasting = [line for line in kept() if line["benchmark"] not in names]
    texts = [json.dumps(line, sort_keys=True) for line in sorted((*lasting, *new), key=lambda line: line["benchmark"])]
    RESULTS.write_text("[\n" + ",\n".join(texts) + "\n]\n")
    return True


def goals_table(lines: Iterable[Line]) -> str:
    """Each goal beside what was measured."""
    rows = ["| | measured | goal | |", "| --- | --- | --- | --- |"]
    for each in reached(by_name(lines)):
        limit = each.goal.at_least if each.goal.at_least is not None else each.goal.at_most
        assert limit is not None
        sign = "at least" if each.goal.at_least is not None else "at most"
        rows.append(f"| {each.goal.row} | {_measured(each)} | {sign} {_number(limit)} | {_outcome(each)} |")
    return "\n".join(rows) + "\n"


def _measured(each: Reached) -> str:
    return "not measured" if each.value is None else _number(each.value)


def _outcome(each: Reached) -> str:
    return {True: "reached", False: "**missed**", None: ""}[each.is_met]


def plot(name: str) -> str:
    """A plot as part of docs/BENCHMARKS.md; nothing, if it was not drawn yet."""
    file = RESULTS.parent / f"{name}.svg"
    return f"![{PLOTS[name]}](benchmarks/{file.name})\n" if file.exists() else ""


def figures_table(lines: Iterable[Line], benchmark: str) -> str:
    """A benchmark's figures, with the lowest and highest round of each."""
    mine = [line for line in lines if line["benchmark"] == benchmark]
    found = [line for line in mine if "value" in line]
    rows = []
    if found:
        rows = ["| | median | rounds, lowest to highest | |", "| --- | --- | --- | --- |"]
    for line in found:
        lowest, highest = min(line["each"]), max(line["each"])
        spread = f"{_number(lowest)} to {_number(highest)}" if len(line["each"]) > 1 else ""
        facts = ", ".join(f"{_words(name)} {_fact(line[name])}" for name in line if name not in _NOT_SHOWN)
        rows.append(f"| {line['name']} | {_number(line['value'])} {line['unit']} | {spread} | {facts} |")
    missing = [
        f"- {line.get('name', benchmark)}: not measured, {line['skipped']}" for line in mine if "skipped" in line
    ]
    about = [f"\n{_run(found[0])}"] if found else []
    if not mine:
        about = [f"Not measured yet: `./run bench --peers {benchmark}`."]
    return "\n".join([*rows, *missing, *about]) + "\n"


def _run(line: Line) -> str:
    """The machine, when and how."""
    scale = "" if line["scale"] == 1 else f" --scale {line['scale']:g}"
    code = f", code {line['code']}" if "code" in line else ""
    return (
        f"`{line['command']}{scale}`, {line['date']}{code}: {line['cpu']}, "
        f"{line['cores']} cores, {line['memory_gb']:g} GB, Python {line['python']}."
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


def _fact(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _number(value: float) -> str:
    """Three digits, in full."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:g}"
