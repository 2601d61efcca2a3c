"""`./run chaos`: runs of several seeds, each with a cluster of its own. Exit code 1 after any anomaly."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.chaos import coverage
from tests.chaos.plan import KINDS, LOSSES, MOVES, Plan, plan
from tests.chaos.run import run


class Arguments(NamedTuple):
    """What is asked for."""

    plans: list[Plan]
    required: tuple[str, ...]


def parsed(given: Sequence[str]) -> Arguments:
    """The plans of the command line. Ends the process if it is wrong."""
    parser = argparse.ArgumentParser(prog="./run chaos", description=__doc__)
    kinds, losses = ", ".join(KINDS), ", ".join((*LOSSES, *MOVES))
    parser.add_argument("--seeds", default="1,2,3", help="numbers with commas between, or ranges: 1-20 (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="that the faults of a seed take (%(default)s)")
    parser.add_argument("--replication-factor", type=int, default=1, help="of the topic (%(default)s)")
    parser.add_argument("--acks", choices=("1", "all"), help="of producers; all if there are replicas, else 1")
    parser.add_argument("--kinds", default="", help=f"the faults: {kinds}, and with three replicas {losses}")
    parser.add_argument("--require", help="situations that the seeds together have to reach, instead of the usual ones")
    arguments = parser.parse_args(given)
    chosen = _names(arguments.kinds)
    if unknown := set(chosen) - {*KINDS, *LOSSES, *MOVES}:
        parser.error(f"there are no faults {', '.join(sorted(unknown))}")
    factor = arguments.replication_factor
    required = coverage.REQUIRED_REPLICATED if factor > 1 else coverage.REQUIRED
    if arguments.require is not None:
        required = _names(arguments.require)
    try:
        coverage.missing(Counter(), required)
        seeds = _seeds(arguments.seeds)
    except ValueError as error:
        parser.error(str(error))
    return Arguments([plan(seed, arguments.seconds, factor, chosen, arguments.acks) for seed in seeds], required)


def main() -> int:
    plans, required = parsed(sys.argv[1:])
    logging.getLogger("kafkalog").setLevel(logging.ERROR)  # clients warn of each fault
    operations, faults, anomalies, reached = 0, 0, 0, Counter[str]()
    for each in plans:
        folder = Path(tempfile.mkdtemp(prefix=f"kafkalog-chaos-{each.seed}-"))
        outcome = run(each, folder)
        operations += outcome.operations
        faults += sum(outcome.faults.values())
        anomalies += len(outcome.anomalies)
        reached += outcome.reached
        if outcome.anomalies:
            print(f"seed {each.seed}: its files are in {folder}")
        else:
            shutil.rmtree(folder)
    never = coverage.missing(reached, required)
    if never:
        print(f"no seed reached: {', '.join(never)}")
    print(f"{len(plans)} seeds, {operations} operations, {faults} faults, {anomalies} anomalies", flush=True)
    return 1 if anomalies or never else 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _seeds(text: str) -> list[int]:
    found: list[int] = []
    for part in _names(text):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


if __name__ == "__main__":
    sys.exit(main())
