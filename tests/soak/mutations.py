"""Makes mistakes in the pure modules, one at a time, and has their tests run on each: `python -m tests.soak.mutations`.

mutmut makes the mistakes (a comparison turned, a number off by one, an argument left out) and runs, for each, the
tests that pass through its function, in a copy of the sources in a folder of its own. Only tests that start no process
are run, so that thousands of mistakes are looked at in minutes. What is printed is each module's score and, if asked
for, the mistakes that no test saw, as differences.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

MODULES = {
    "kafkalog/retry.py": ["*"],
    "kafkalog/client/link.py": ["*"],
    "kafkalog/format/batch.py": ["*"],
    "kafkalog/format/columns.py": ["*"],
    "broker/storage/index.py": ["*"],
    "broker/storage/scan.py": ["*"],
    "broker/storage/checksums.py": ["*"],
    "broker/storage/producer_state.py": ["*"],
    "broker/storage/retention.py": ["*"],
    "kafkalog/client/producer/queue.py": ["*"],
    "pyspark_kafkalog/read/ranges.py": ["*"],
    "pyspark_kafkalog/offsets.py": ["*"],
    "pyspark_kafkalog/read/admission.py": ["*"],
    "kafkalog/format/decisions.py": ["*"],
    "kafkalog/wire/decisions.py": ["*"],
    "kafkalog/client/transaction/coordinator.py": ["next_step"],
    "broker/replica/in_doubt.py": ["resolution"],
}
"""Module -> its functions in which mistakes are made; of the last two only the rule is pure."""

TESTS = [
    "tests/kafkalog/test_retry.py",
    "tests/kafkalog/client/test_link.py",
    "tests/kafkalog/format",
    "tests/kafkalog/wire",
    "tests/kafkalog/client/producer/test_queue.py",
    "tests/kafkalog/client/transaction/test_coordinator.py",
    "tests/broker/storage/test_index.py",
    "tests/broker/storage/test_scan.py",
    "tests/broker/storage/test_checksums.py",
    "tests/broker/storage/test_producer_state.py",
    "tests/broker/storage/test_retention.py",
    "tests/broker/storage/test_golden.py",
    "tests/broker/storage/test_log.py",
    "tests/broker/replica/test_in_doubt.py",
    "tests/pyspark_kafkalog/read/test_ranges.py",
    "tests/pyspark_kafkalog/test_offsets.py",
    "tests/pyspark_kafkalog/test_options.py",
    "tests/pyspark_kafkalog/read/test_options.py",
    "tests/pyspark_kafkalog/read/test_admission.py",
]

_SETTINGS = """
[tool.mutmut]
source_paths = ["kafkalog", "broker", "pyspark_kafkalog"]
only_mutate = {modules}
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:randomly", "--timeout", "60"]
pytest_add_cli_args_test_selection = {tests}
do_not_mutate_patterns = ['"[^" ,()][^",()]* [^"]*"', 'log\\.(debug|info|warning|error|exception)\\(', '^\\s*assert ']
also_copy = ["README.md"]
use_git_change_detection = false
process_isolation = "forkserver"
"""
"""No mistakes are made in lines with a sentence (a text with a space in it), in what is logged, and in assertions. Each
process that runs tests is forked from one that has run none: no process has what an earlier test has computed."""

AT_IMPORT = ("kafkalog.format.columns.x__schema__",)
"""Functions that run when their module is imported only: a process that has imported it does not see their mistakes."""

# Appended to the conftest of the copy in which mistakes are made, over the fixture that starts a cluster. Modules are
# pure, and so are the tests that are to see their mistakes; to start ZooKeeper and brokers for each of 2,000 mistakes
# would take hours. A test left out can only lower the score. In the project's own run nothing of this is skipped.
_NO_CLUSTER = """

@pytest.fixture(scope="session")
def cluster():
    pytest.skip("no process is started for a mistake")
"""

_SEEN = ("killed", "timeout", "segfault", "caught by type check")
_UNSEEN = ("survived", "no tests", "suspicious")


class Score(NamedTuple):
    """Of one module: how many mistakes were seen, and the names of those that were not."""

    module: str
    seen: int
    survivors: tuple[str, ...]

    @property
    def made(self) -> int:
        return self.seen + len(self.survivors)


class Copy:
    """The sources in a folder of their own, with mutmut set up over some modules.

    Args:
        modules: paths of `MODULES`.
    """

    def __init__(self, folder: Path, modules: Iterable[str] = MODULES) -> None:
        self.folder = folder
        self.modules = list(modules)
        left_out = shutil.ignore_patterns("__pycache__", "*.pyc", "soak", "fire")
        for name in ("kafkalog", "broker", "pyspark_kafkalog", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=left_out, dirs_exist_ok=True)
        for name in ("README.md", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        tests = [test for test in TESTS if (ROOT / test).exists()]
        with (folder / "pyproject.toml").open("a") as file:
            file.write(_SETTINGS.format(modules=self.modules, tests=tests))

        with (folder / "tests" / "conftest.py").open("a") as file:
            file.write(_NO_CLUSTER)

    def run(self, sample: int | None = None, seed: int = 0) -> list[Score]:
        """Make the mistakes and run the tests; the modules' scores.

        Args:
            sample: only so many of each module, chosen by the seed.
        """
        patterns = [pattern for module in self.modules for pattern in _patterns(module)]
        if sample is None:
            self._mutmut("run", *patterns)
        else:
            # It makes them all and finds out which tests concern which, whatever it is to run: one of each function.
            self._mutmut("run", patterns[-1] + "mutmut_1")
            dice, chosen = random.Random(seed), []
            for module in self.modules:
                names = [name for name, _ in self._states() if any(fnmatch(name, each) for each in _patterns(module))]
                chosen += dice.sample(names, min(sample, len(names)))
            self._mutmut("run", *chosen)
        found: dict[str, tuple[list[str], list[str]]] = {module: ([], []) for module in self.modules}
        for name, state in self._states():
            module = name.rpartition(".")[0].replace(".", "/") + ".py"
            if state in _SEEN or state in _UNSEEN:
                found[module][state in _UNSEEN].append(name)
        return [Score(module, len(seen), tuple(unseen)) for module, (seen, unseen) in found.items()]

    def _states(self) -> list[tuple[str, str]]:
        """Each mistake's name and what became of it; those that no process could see are left out."""
        told = re.findall(r"^ +(\S+): (.+)$", self._mutmut("results", "--all", "true"), re.MULTILINE)
        return [(name, state) for name, state in told if not name.startswith(AT_IMPORT)]

    def difference(self, name: str) -> str:
        """A mistake, as the difference that it makes to its module."""
        lines = self._mutmut("show", name).splitlines()
        return "\n".join(line for line in lines if re.match(r"[-+@](?![-+])", line) or line.startswith("@@"))

    def _mutmut(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST_"))}
        ran = subprocess.run(
            [sys.executable, "-m", "mutmut", *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ran.returncode:
            raise RuntimeError(f"mutmut {arguments[0]} failed:\n{ran.stdout[-5000:]}")
        return ran.stdout


def _patterns(module: str) -> list[str]:
    """mutmut's names of the mistakes in a module's functions."""
    dotted = module.removesuffix(".py").replace("/", ".")
    return [f"{dotted}.*" if function == "*" else f"{dotted}.x_{function}__*" for function in MODULES[module]]


def table(scores: list[Score]) -> str:
    """The scores for people; the last line is of all modules."""
    total = Score("all", sum(score.seen for score in scores), sum((score.survivors for score in scores), ()))
    return "\n".join(
        f"{score.module:<34} {score.seen:>5} of {score.made:>5} seen  {100 * score.seen / max(score.made, 1):5.1f} %"
        for score in [*scores, total]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make mistakes in the pure modules and see which the tests notice.")
    parser.add_argument("modules", nargs="*", help=f"some of {', '.join(MODULES)}; all if none is named")
    parser.add_argument("--folder", type=Path, help="keep the copy there, for `mutmut browse`")
    parser.add_argument("--survivors", action="store_true", help="show what no test saw")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mistakes of each module")
    parser.add_argument("--seed", type=int, default=0, help="which (default 0)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kafkalog-mutations-") as temporary:
        copy = Copy(given.folder or Path(temporary), given.modules or MODULES)
        scores = copy.run(given.sample, given.seed)
        print(table(scores))
        if given.survivors:
            for score in scores:
                for name in score.survivors:
                    print(f"\n{name}\n{copy.difference(name)}")


if __name__ == "__main__":
    main()
