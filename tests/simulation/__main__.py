"""`./run simulate`: simulations of many seeds. Exit code 1 after any anomaly, or if a situation was never reached."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

from rich.progress import track

from tests.simulation.plan import plan
from tests.simulation.planted import PLANTED, planted
from tests.simulation.world import PROBES, Outcome, run

_MANY = 100
"""From so many seeds on, they together have to reach every situation."""
_LOG_LINES = 60


def one(seed: int, mistake: str | None = None) -> Outcome:
    """The outcome of a seed.

    Args:
        mistake: to be planted.
    """
    with planted(mistake) if mistake else nullcontext():
        return run(plan(seed))


def parsed(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run simulate", description=__doc__)
    parser.add_argument("--seeds", default="0-99", help="a number, or a range: 0-999 (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    parser.add_argument("--log", action="store_true", help="print all that happened in each seed")
    parser.add_argument("--mistake", choices=PLANTED, metavar="NAME", help=f"plant one: {'; '.join(PLANTED)}")
    arguments = parser.parse_args(given)
    first, _, last = arguments.seeds.partition("-")
    if not (first.isdigit() and (last or first).isdigit() and int(first) <= int(last or first)):
        parser.error(f"--seeds must be a number or a range such as 0-999, got {arguments.seeds}")
    if arguments.jobs < 1:
        parser.error(f"--jobs must be >= 1, got {arguments.jobs}")
    arguments.seeds = range(int(first), int(last or first) + 1)
    return arguments


def main() -> int:
    arguments = parsed(sys.argv[1:])
    seeds, mistake = arguments.seeds, arguments.mistake
    if arguments.jobs == 1 or len(seeds) == 1:
        return report((one(seed, mistake) for seed in seeds), arguments)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        try:
            return report(pool.map(one, seeds, [mistake] * len(seeds)), arguments)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            return 130


def report(outcomes: Iterable[Outcome], arguments: argparse.Namespace) -> int:
    """Print what is to be known of outcomes as they come; returns the exit code."""
    count = events = faults = anomalies = 0
    reached = Counter[str]()
    shown = track(outcomes, "simulating", len(arguments.seeds), disable=not sys.stderr.isatty())
    for outcome in shown:
        count += 1
        events += outcome.events
        faults += outcome.faults
        anomalies += len(outcome.anomalies)
        reached += outcome.reached
        if outcome.anomalies or arguments.log:
            print(plan(outcome.seed))
            print("\n".join(outcome.log if arguments.log else outcome.log[-_LOG_LINES:]))
        for anomaly in outcome.anomalies:
            print(f"seed {outcome.seed}: {anomaly.name}: {anomaly.text}")
        if outcome.anomalies:
            print(f"to see all of it: ./run simulate --seeds {outcome.seed} --log", flush=True)
    never = [name for name in PROBES if not reached[name]] if count >= _MANY else []
    if never:
        print(f"no seed reached: {', '.join(never)}")
    print(f"{count} seeds, {events} events, {faults} faults, {anomalies} anomalies", flush=True)
    return 1 if anomalies or never else 0


if __name__ == "__main__":
    sys.exit(main())
