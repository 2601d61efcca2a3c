"""Sources that Spark asks one after the other know of each other, those of other queries do not count."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pyspark_kafkalog.read.neighbours import Neighbours


def ask(*sources: Neighbours) -> list[int]:
    """What each finds when they are asked in turn, as one query does."""
    found = []
    for source in sources:
        found.append(source.asked())
        source.answered()
    return found


def test_sources_of_one_query_count_each_other_from_the_second_time_on(tmp_path: Path) -> None:
    one, two, three = (Neighbours(tmp_path) for _ in range(3))
    assert ask(one, two) == [0, 0]
    assert ask(one, two) == ask(one, two) == [1, 1]
    assert ask(one, two, three) == [1, 1, 0]
    assert ask(one, two, three) == [2, 2, 2]
    del three  # its file goes with it
    assert len(list(tmp_path.iterdir())) == 2
    assert ask(one, two) == ask(one, two) == [1, 1]
    del two
    assert ask(one) == [0]


@pytest.mark.parametrize("first_to_answer", [0, 1])
def test_sources_that_were_once_busy_at_the_same_time_are_of_different_queries(
    tmp_path: Path, first_to_answer: int
) -> None:
    one, two = sources = Neighbours(tmp_path), Neighbours(tmp_path)
    ask(one, two)
    one.asked()
    two.asked()
    sources[first_to_answer].answered()
    sources[1 - first_to_answer].answered()
    assert ask(one, two) == ask(one, two) == [0, 0]


def test_one_that_was_not_asked_in_between_does_not_count(tmp_path: Path) -> None:
    one, two = Neighbours(tmp_path), Neighbours(tmp_path)
    ask(one, two)
    assert ask(one, two) == [1, 1]
    assert ask(one) == [1]
    assert ask(one) == [0]


def test_what_an_ended_process_left_is_removed_and_where_nothing_can_be_written_nobody_is_there(tmp_path: Path) -> None:
    lines = "import os, sys; from pathlib import Path; from pyspark_kafkalog.read.neighbours import Neighbours"
    ends = "one = Neighbours(Path(sys.argv[1])); one.asked(); one.answered(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", f"{lines}; {ends}", str(tmp_path)], check=False, env=os.environ)
    assert len(list(tmp_path.iterdir())) == 1
    one = Neighbours(tmp_path)
    ask(one)
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "file").touch()
    assert ask(*(Neighbours(tmp_path / "file") for _ in range(2))) == [0, 0]


def test_where_no_temporary_directory_can_be_written_to_nobody_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    with pytest.raises(FileNotFoundError):
        tempfile.gettempdir()
    one, two = Neighbours(), Neighbours()
    assert ask(one, two) == ask(one, two) == [0, 0]


def test_one_that_is_busy_while_another_is_asked_does_not_count_even_then(tmp_path: Path) -> None:
    one, two = Neighbours(tmp_path), Neighbours(tmp_path)
    ask(one, two)
    assert ask(one, two) == [1, 1]
    one.asked()
    assert two.asked() == 0


def test_a_source_that_is_gone_keeps_no_file_open_and_one_of_a_forked_child_takes_none_along(tmp_path: Path) -> None:
    one = Neighbours(tmp_path)
    one.asked()
    child = os.fork()
    if not child:
        del one
        os._exit(len(list(tmp_path.iterdir())) != 1)
    assert os.waitpid(child, 0)[1] == 0
    [path] = tmp_path.iterdir()
    [file] = [each for each in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{each}") == str(path)]
    del one
    assert list(tmp_path.iterdir()) == []
    assert not os.path.realpath(f"/proc/self/fd/{file}").startswith(str(path))


def test_files_that_go_while_they_are_looked_at_hide_no_others(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{os.getppid()}_gone{number}").symlink_to("nowhere")
    one, two = Neighbours(tmp_path), Neighbours(tmp_path)
    ask(one, two)
    assert ask(one, two) == [1, 1]


def test_nothing_is_written_to_the_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    one, two = Neighbours(tmp_path), Neighbours(tmp_path)
    assert ask(one, two) == ask(one, two) == [0, 0]
    assert list(tmp_path.iterdir()) == []
