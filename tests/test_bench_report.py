"""What is made of the benchmarks' figures: ratios of rounds side by side, tables, plots."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import goals, plots, report
from bench.__main__ import main
from bench.goals import Goal, by_name, reached
from bench.measure import by_turns, figure, ratio


def line(name: str, *each: float, unit: str = "rows/s", **facts: object) -> dict[str, Any]:
    of_run = {"cpu": "a processor", "cores": 2, "memory_gb": 25, "python": "3.11", "scale": 1.0, "date": "2026-11-28"}
    values = {"value": sorted(each)[len(each) // 2], "unit": unit, "each": list(each)}
    return {"benchmark": "b", "name": name, **values, **facts, **of_run, "command": "./run bench b"}


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(*wanted: Goal) -> None:
        monkeypatch.setattr(goals, "GOALS", wanted)

    return put


def test_a_ratio_is_that_of_rounds_side_by_side_and_of_the_fastest_peer(only: Any) -> None:
    only(Goal("row", "b/ours", ("b/slow", "b/fast"), at_least=2.0))
    # The medians' ratio is 40 / 30.
    figures = by_name([line("ours", 20, 80, 40), line("fast", 10, 40, 30), line("slow", 9, 39, 29)])
    [found] = reached(figures)
    assert (found.value, found.is_met) == (2.0, True)


def test_a_time_is_compared_with_the_shortest_of_the_peers(only: Any) -> None:
    only(Goal("row", "b/ours", ("b/slow", "b/fast"), at_most=1.3))
    times = [line("ours", 30, unit="ms"), line("slow", 40, unit="ms"), line("fast", 20, unit="ms")]
    [found] = reached(by_name(times))
    assert (found.value, found.is_met) == (1.5, False)


def test_a_goal_without_its_figures_is_not_measured(only: Any) -> None:
    only(Goal("row", "b/ours", ("b/theirs",), at_least=2.0), Goal("bytes", "b/size", at_most=9.0, subtracted=200.0))
    only(Goal("row", "b/ours", ("b/theirs", "b/others"), at_least=2.0))
    assert [each.value for each in reached(by_name([line("ours", 1), line("theirs", 1)]))] == [None]
    only(Goal("row", "b/ours", ("b/theirs",), at_least=2.0), Goal("bytes", "b/size", at_most=9.0, subtracted=200.0))
    found = reached(by_name([line("ours", 1), line("size", 208.3, unit="bytes"), {"benchmark": "b", "skipped": "no"}]))
    assert [each.value for each in found] == [None, pytest.approx(8.3)]
    assert [each.is_met for each in found] == [None, True]
    table = report.goals_table([line("size", 208.3, unit="bytes")])
    assert "| row | not measured | at least 2 |  |" in table
    assert "| bytes | 8.3 | at most 9 | reached |" in table
    for size, is_met in ((209.0, True), (209.1, False)):
        assert [each.is_met for each in reached(by_name([line("size", size)]))] == [None, is_met]


def test_every_goal_names_a_benchmark_that_is_run_beside_the_peers() -> None:
    for goal in goals.GOALS:
        assert {name.split("/")[0] for name in (goal.ours, *goal.peers)} <= set(report.PEERS)
        assert (goal.at_least is None) != (goal.at_most is None), goal


def test_every_goal_names_figures_that_its_benchmarks_have() -> None:
    """A wrong name would only read "not measured"."""
    found = by_name(report.kept())
    measured = {name.split("/")[0] for name in found}
    named = {name for goal in goals.GOALS for name in (goal.ours, *goal.peers)}
    assert {name for name in named if name.split("/")[0] in measured} <= set(found)


def test_a_run_takes_the_place_of_what_was_kept_of_its_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results.json")
    assert report.kept() == []
    peer = {"benchmark": "b", "name": "Peer", "skipped": "it is not here"}
    assert report.keep([line("old", 1), peer])
    assert report.keep([{**line("other", 2), "benchmark": "c"}])
    assert report.keep([line("new", 3), peer])
    assert {(each["benchmark"], each["name"]) for each in report.kept()} == {
        ("b", "new"),
        ("b", "Peer"),
        ("c", "other"),
    }
    table = report.figures_table(report.kept(), "b")
    assert "| new | 3 rows/s |" in table
    assert "- Peer: not measured, it is not here" in table
    assert "| 5 rows/s | 1 to 9 |" in report.figures_table([line("spread", 5, 9, 1)], "b")
    assert "`./run bench b`, 2026-11-28: a processor, 2 cores, 25 GB, Python 3.11." in table
    of_code = report.figures_table([{**line("new", 3), "code": "0a1b2c3d"}], "b")
    assert "`./run bench b`, 2026-11-28, code 0a1b2c3d: a processor" in of_code
    assert report.figures_table(report.kept(), "d") == "Not measured yet: `./run bench --peers d`.\n"


def test_plots_are_drawn_of_what_was_measured_and_the_same_from_the_same_figures(tmp_path: Path) -> None:
    scale = [
        {**line(f"{doing}, clients, {at}, {system}", 10 * at, axis="clients", at=at), "benchmark": "scale"}
        for doing in ("produce", "consume")
        for system in ("kafkalog", "kafka")
        for at in (1, 4)
    ]
    lines = [{**line("produce, kafkalog, send", 5, 6, 7), "benchmark": "paper"}, *scale]
    first = {file.name: file.read_bytes() for file in plots.draw(lines, tmp_path)}
    assert set(first) == {"produce.svg", "scale.svg"}
    assert first == {file.name: file.read_bytes() for file in plots.draw(lines, tmp_path)}
    assert b"produce, kafkalog, send" in first["produce.svg"]
    assert plots.draw([], tmp_path) == [] and list(tmp_path.iterdir()) == [], "no plot of what is not measured stays"


def test_a_run_without_a_peer_replaces_no_figures_of_one_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results.json")
    measured = {"benchmark": "b", "name": "ours", "value": 1}
    missing = {"benchmark": "b", "skipped": "no network"}
    assert report.keep([missing])
    assert report.kept() == [missing]
    of_peer = {**measured, "name": "theirs"}
    assert report.keep([measured, of_peer])
    assert not report.keep([missing])
    assert not report.keep([{**measured, "value": 3}, {**missing, "name": "Peer"}])
    assert report.kept() == [measured, of_peer]
    assert report.keep([{**measured, "value": 2}, of_peer])
    assert report.kept() == [{**measured, "value": 2}, of_peer]


def test_a_benchmark_that_fails_loses_no_figures_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(scale: float) -> Iterator[dict[str, object]]:
        yield {"name": "half", "value": 1}
        raise RuntimeError("a record is missing")

    monkeypatch.setattr(report, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr("bench.paper.run", lambda scale: [{"name": "first", "value": 1}])
    monkeypatch.setattr("bench.confluent.run", fails)
    monkeypatch.setattr("bench.start.run", lambda scale: [{"name": "last", "value": 2}])
    monkeypatch.setattr("bench.plots.draw", list)
    monkeypatch.setattr("docs.generate.main", lambda: None)
    monkeypatch.setattr("bench.__main__._lacks", lambda: None)
    assert main(["--peers", "paper", "confluent", "start"]) == 1
    assert [each["name"] for each in report.kept()] == ["first", "last"]
    said = capsys.readouterr().err
    assert "confluent has failed; its figures are not kept" in said and "a record is missing" in said


def test_every_candidate_runs_once_a_round_in_orders_that_differ() -> None:
    ran: list[str] = []
    names = "abcd"
    taken = by_turns({name: partial(ran.append, name) for name in names}, 1.0, runs=5, warmups=1)
    rounds = ["".join(ran[start : start + 4]) for start in range(0, len(ran), 4)]
    assert [sorted(each) for each in rounds] == [list(names)] * 6
    follows = [pair for each in rounds[1:5] for pair in itertools.pairwise(each)]
    assert sorted(follows) == sorted(itertools.permutations(names, 2)), "each follows each other one once"
    assert {name: len(each) for name, each in taken.items()} == dict.fromkeys(names, 5)


def test_in_twice_as_many_rounds_as_an_odd_number_of_names_each_follows_each_other_one_equally_often() -> None:
    ran: list[str] = []
    by_turns({name: partial(ran.append, name) for name in "abc"}, 1.0, runs=6, warmups=0)
    rounds = ["".join(ran[start : start + 3]) for start in range(0, len(ran), 3)]
    follows = [pair for each in rounds for pair in itertools.pairwise(each)]
    assert sorted(follows) == sorted(2 * list(itertools.permutations("abc", 2)))


def test_before_each_run_something_may_be_made_ready() -> None:
    ran: list[str] = []
    by_turns({"a": partial(ran.append, "a")}, 1.0, runs=2, warmups=1, before=partial(ran.append, "ready"))
    assert ran == ["ready", "a"] * 3


def test_a_figure_is_the_median_and_a_ratio_says_how_fast_we_are() -> None:
    assert figure("f", "s", [1.0, 9.0, 2.0])["value"] == 2.0
    assert ratio([1.0, 1.0, 1.0], [2.0, 4.0, 3.0]) == 3.0, "the reference takes three times as long"
