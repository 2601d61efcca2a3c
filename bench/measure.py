"""Interleaved runs and their medians, a process's memory, topics to measure on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from broker.local import LocalCluster
from kafkalog import Admin, TopicPartition

Measured = TypeVar("Measured")

_UNLINKED_WITHIN_SECONDS = 60.0


class NotAvailable(Exception):
    """What a benchmark needs and this machine has not, in one sentence: there are no figures then."""


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    scale: float,
    runs: int = 5,
    warmups: int = 1,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each run of each candidate, as by `by_turns`."""
    timed = {name: partial(seconds, function) for name, function in candidates.items()}
    return by_turns(timed, scale, runs, warmups, before)


def by_turns(
    candidates: Mapping[str, Callable[[], Measured]],
    scale: float,
    runs: int = 5,
    warmups: int = 1,
    before: Callable[[], object] = lambda: None,
) -> dict[str, list[Measured]]:
    """What each run of each candidate measured of itself, one round after the other, after some that are not counted.

    The machine is shared: what is compared runs side by side in time, so that a slow minute hits both. Each round has
    an order of its own, by its number, so that none always follows the same one.

    Args:
        scale: of the whole benchmark; below a tenth one run of each is enough, for its figures mean nothing.
        warmups: how many are not counted; in Spark's first series of a kind three, for in its first runs Java compiles.
        before: called before every run, its time not counted.
    """
    if scale < 0.1:
        runs, warmups = 1, 0
    measured: dict[str, list[Measured]] = {name: [] for name in candidates}
    for run in range(-warmups, runs):
        for name in in_order(list(candidates), run):
            before()
            taken = candidates[name]()
            if run >= 0:
                measured[name].append(taken)
    return measured


def in_order(names: Sequence[str], run: int) -> list[str]:
    """The order of a round, a row of a Williams square: in as many rounds as there are names, or twice as many if that
    is odd, each name follows each other one equally often."""
    count = len(names)
    row = [((number + 1) // 2 if number % 2 else -(number // 2)) for number in range(count)]
    order = [names[(place + run) % count] for place in row]
    return order[::-1] if count % 2 and run // count % 2 else order


def fresh_topic(
    admin: Admin, cluster: LocalCluster, name: str, partitions: int, replication_factor: int | None = None
) -> None:
    """Make a topic anew, for one run: what is deleted soon needs no writing back, which the next run would wait for.

    Returns once the old one's files are gone: brokers unlink them beside everything else, 0.1 s of a core a GB.
    """
    if name in {topic.name for topic in admin.topics()}:
        admin.delete_topic(name)
    admin.create_topic(name, partitions=partitions, replication_factor=replication_factor)
    looked_for(
        lambda: not any(cluster.root.glob("broker-*/*.deleted")), _UNLINKED_WITHIN_SECONDS, f"files of {name} are left"
    )


def looked_for(event: Callable[[], bool], within_seconds: float, otherwise: str) -> None:
    """Return once something has come to be that nobody reports. Raises RuntimeError: it has not within its time."""
    deadline = time.monotonic() + within_seconds
    while not event():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{otherwise} after {within_seconds:.0f} s")
        # Servers, ours and Kafka's, push nothing to clients: not that files are unlinked, a broker is registered, or
        # replicas are in sync. So this looks again; 10 ms are the resolution of what is timed by it, in seconds.
        time.sleep(0.01)


def all_there(found: int, wanted: int, what: str) -> None:
    """Raises RuntimeError: records are missing, or there twice."""
    if found != wanted:
        raise RuntimeError(f"{what} has {found} records, of {wanted} that were written")


def records_in(admin: Admin, topic: str, partitions: int) -> int:
    """How many records a topic of kafkalog's has, by its end offsets."""
    places = [TopicPartition(topic, partition) for partition in range(partitions)]
    return sum(each.offset or 0 for each in admin.list_offsets(dict.fromkeys(places, "latest")).values())


def rate(count: int, times: list[float]) -> float:
    """Units a second at the median time."""
    return count / statistics.median(times)


def ratio(ours: list[float], reference: list[float]) -> float:
    """How fast we are as a share of the reference: median of the pairwise ratios of interleaved runs.

    The other way round, `ratio(reference, ours)`, it is how much longer we take.
    """
    return statistics.median(theirs / mine for mine, theirs in zip(ours, reference, strict=True))


def figure(name: str, unit: str, each: list[float], **facts: object) -> dict[str, object]:
    """A figure of a series: its median, and what each round measured, for ratios of rounds side by side (`goals`)."""
    return {
        "name": name,
        "value": rounded(statistics.median(each)),
        "unit": unit,
        "each": list(map(rounded, each)),
        **facts,
    }


def rounded(value: float) -> float:
    """To four digits, for people."""
    return float(f"{value:.4g}")


def memory_peak_bytes(pid: int) -> int:
    """The largest resident set that a process has had (VmHWM)."""
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} reports no VmHWM")


def throughput(
    times: Mapping[str, list[float]], counts: Mapping[str, int], record_bytes: int, broker_pids: Sequence[int]
) -> Iterator[dict[str, object]]:
    """A figure for each candidate: its records a second, and the brokers' peak memory through all of them."""
    peak = max(map(memory_peak_bytes, broker_pids))
    for name, taken in times.items():
        yield {
            "name": name,
            "value": round(rate(counts[name], taken)),
            "unit": "records/s",
            "records": counts[name],
            "record_bytes": record_bytes,
            "seconds": [round(t, 4) for t in taken],
            "broker_memory_peak_mb": round(peak / 1e6, 1),
        }
