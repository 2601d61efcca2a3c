"""Draws the figures of docs/benchmarks/results.json as SVG files beside it, for `./run bench --peers`."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from PIL import Image  # which matplotlib requires, and writes its PNG with

from bench.goals import by_name, reached
from bench.report import PLOTS, RESULTS, Line, kept

_OURS, _PEERS = "#00796b", "#b0bec5"
_SYSTEMS = {"kafkalog": _OURS, "kafka": "#ef6c00"}
_BARS = {
    "produce": ("paper", "produce, "),
    "consume": ("paper", "consume, "),
    "spark-read": ("kafka", "read, "),
    "spark-write": ("kafka", "write"),
    "latency": ("kafka_stream", "stream to stream at"),
    "durable": ("durable", ""),
}
"""Plot: benchmark, and how the names of its figures begin."""


def draw(lines: Iterable[Line] | None = None, folder: Path = RESULTS.parent) -> list[Path]:
    """Draw the plots of what was measured. Returns their files; those of what is not there any more are removed."""
    matplotlib.rcParams["svg.hashsalt"] = "kafkalog"  # the same figures make the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    drawn = figures(kept() if lines is None else lines)
    for name in PLOTS:
        if name in drawn:
            drawn[name].savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
        else:
            (folder / f"{name}.svg").unlink(missing_ok=True)
    return [folder / f"{name}.svg" for name in drawn]


def figures(lines: Iterable[Line]) -> dict[str, Figure]:
    """The plots by name (`PLOTS`), of what was measured."""
    found = list(lines)
    drawn: dict[str, Figure] = {}
    if any(each.value is not None for each in reached(by_name(found))):
        drawn["goals"] = goals(found)
    for name, (benchmark, start) in _BARS.items():
        if _of(found, benchmark, start):
            drawn[name] = bars(found, benchmark, start, PLOTS[name])
    if _of(found, "scale", ""):
        drawn["scale"] = scale(found)
    return drawn


def _of(lines: Iterable[Line], benchmark: str, start: str) -> list[Line]:
    """The figures of a benchmark whose names begin so."""
    return [
        line for line in lines if line["benchmark"] == benchmark and "value" in line and line["name"].startswith(start)
    ]


def bars(lines: Iterable[Line], benchmark: str, start: str, title: str) -> Figure:
    """A bar a figure, and the range of its rounds."""
    found = _of(lines, benchmark, start)
    figure = Figure(figsize=(9, 0.5 + 0.27 * max(1, len(found))))
    axes = figure.add_subplot()
    values = [line["value"] for line in found]
    reach = [
        [line["value"] - min(line["each"]) for line in found],
        [max(line["each"]) - line["value"] for line in found],
    ]
    colours = [_OURS if _is_ours(line["name"]) else _PEERS for line in found]
    axes.barh(range(len(found)), values, xerr=reach, color=colours, error_kw={"elinewidth": 0.8, "ecolor": "#455a64"})
    axes.set_yticks(range(len(found)), [line["name"] for line in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9, loc="left")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def goals(lines: Iterable[Line]) -> Figure:
    """How far each goal is reached: 1 is the goal, more is better."""
    found = [each for each in reached(by_name(lines)) if each.value is not None]
    figure = Figure(figsize=(9, 0.5 + 0.27 * max(1, len(found))))
    axes = figure.add_subplot()
    shares = []
    for each in found:
        assert each.value is not None
        goal = each.goal
        shares.append(each.value / goal.at_least if goal.at_least is not None else (goal.at_most or 0) / each.value)
    axes.barh(range(len(found)), shares, color=[_OURS if each.is_met else "#e57373" for each in found])
    axes.axvline(1.0, color="#455a64", linewidth=0.8)
    axes.set_yticks(range(len(found)), [each.goal.row for each in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(PLOTS["goals"], fontsize=9, loc="left")
    axes.tick_params(axis="x", labelsize=8)
    return figure


def scale(lines: Iterable[Line]) -> Figure:
    """A plot for each axis of `bench/scale.py`, a line for each system and each thing it does."""
    found = [line for line in lines if line["benchmark"] == "scale" and "at" in line]
    kinds = list(dict.fromkeys(line["axis"] for line in found))
    figure = Figure(figsize=(9, 3))
    for number, axis in enumerate(kinds):
        axes = figure.add_subplot(1, len(kinds), number + 1)
        for doing, style in (("produce", "-"), ("consume", "--")):
            for system, colour in _SYSTEMS.items():
                points = _points(found, axis, doing, system)
                axes.plot(*zip(*points, strict=True), style, color=colour, marker=".", label=f"{doing}, {system}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(axis, fontsize=8)
        axes.tick_params(labelsize=7)
        if number == 0:
            axes.set_ylabel("records/s", fontsize=8)
            axes.legend(fontsize=6)
    return figure


def _points(lines: Iterable[Mapping[str, Any]], axis: str, doing: str, system: str) -> list[tuple[float, float]]:
    wanted = [line for line in lines if line["axis"] == axis]
    return [
        (line["at"], line["value"])
        for line in wanted
        if line["name"].startswith(f"{doing},") and line["name"].endswith(f", {system}")
    ]


def png(figure: Figure) -> bytes:
    """A figure for a notebook, in 16 colours: a quarter of the bytes of one in all."""
    drawn, reduced = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=60, bbox_inches="tight")
    Image.open(drawn).convert("RGB").quantize(16).save(reduced, "png", optimize=True)
    return reduced.getvalue()


def _is_ours(name: str) -> bool:
    return "kafkalog" in name or "exactly-once" in name or "at-least-once" in name
