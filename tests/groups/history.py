"""What the members of a group did, as they wrote it themselves, and the rules that it must keep.

Each process appends the lines of one file: `time event partition offset end_offset`, the time by the monotonic clock
that all processes of a machine share, in nanoseconds. A line is written by one call to the system, so a process that is
killed leaves whole lines. The file's stem is the member's name. The test writes a file too, of what it did to whom.

| event      | of a member's partition                                                                |
|------------|----------------------------------------------------------------------------------------|
| assigned   | it is read from `offset` on                                                            |
| out        | records from `offset` to `end_offset` were handed out                                  |
| back       | records before `offset` were handed back                                               |
| revoked    | others are to read it                                                                  |
| lost       | others may read it already                                                             |
| committing | a commit of `offset` is sent                                                           |
| committed  | a commit of `offset` was acknowledged                                                  |

| event      | of the test                                                                            |
|------------|----------------------------------------------------------------------------------------|
| killed     | this member                                                                            |
| stopped    | this member, by SIGSTOP                                                                |
| continued  | this member; written before SIGCONT                                                    |
| disturbed  | from now on partitions may move; after `offset` ms each of them has its owner          |
| partitions | there are `offset` of them                                                             |

`violations` checks:

- One owner: nobody hands out, commits or gives back a partition after another member was assigned it. An owner that
  lost it without noticing is no violation, as long as it does nothing. A process that is stopped between a hand-out and
  the line that says so writes the line when it continues: that first line is excused.
- In order: a member hands out all records from where it was assigned on, each once.
- A start is the offset of a commit, none before the last acknowledged one. So what is handed out twice was handed out
  after that commit.
- Commits: none is past what was handed back to the member, and none goes back behind one that was acknowledged before
  it was sent.
- Complete: all records were handed out.
- Quiet: each partition has its owner, a live member, when a disturbance has had its time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".history"


class Event(NamedTuple):
    """A line of a history, and the member that it is about."""

    time_ns: int
    member: str
    event: str
    partition: int
    offset: int = 0
    end_offset: int = 0


class Writer:
    """Appends to one file, from any thread."""

    def __init__(self, folder: Path, member: str) -> None:
        self._fd = os.open(folder / (member + SUFFIX), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, partition: int = -1, offset: int = 0, end_offset: int = 0, member: str = "") -> None:
        """Write what has just happened; of another member if one is named."""
        self.write_all(event, [(partition, offset, end_offset)], member)

    def write_all(self, event: str, found: Iterable[tuple[int, int, int]], member: str = "") -> None:
        """The same of several partitions at once."""
        now = time.monotonic_ns()
        lines = "".join(f"{now} {event} {p} {start} {end} {member}\n" for p, start, end in found)
        os.write(self._fd, lines.encode())


class Reader:
    """Reads the files of a folder as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def news(self) -> list[Event]:
        """What was written since the last call, in the order of time."""
        found: list[Event] = []
        for path in sorted(self._folder.glob("*" + SUFFIX)):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            found += [_parse(path.stem, line) for line in whole.decode().splitlines()]
        return sorted(found, key=lambda event: event.time_ns)


def _parse(stem: str, line: str) -> Event:
    time_ns, event, partition, offset, end_offset, *named = line.split()
    member = named[0] if named else stem
    return Event(int(time_ns), member, event, int(partition), int(offset), int(end_offset))


@dataclass
class _Reading:
    """A partition in the hands of a member."""

    start: int
    next_offset: int
    back: int
    successor: str = ""  # the member that was assigned it next, although this one has not ended it
    ended: bool = False


@dataclass
class _Partition:
    readings: dict[str, _Reading] = field(default_factory=dict)  # the last one of each member
    owner: str = ""
    acknowledged: int = 0
    highest_sent: int = 0
    sent: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # what was acknowledged at the sending
    handed_out: int = 0  # records, those that were again included
    seen: list[tuple[int, int]] = field(default_factory=list)

    def see(self, start: int, end: int) -> None:
        self.handed_out += end - start
        first, last = self.seen[-1] if self.seen else (start, start)
        if first <= start <= last:
            self.seen[-1:] = [(first, max(last, end))]
        else:
            self.seen.append((start, end))

    def gaps(self, end_offset: int) -> list[tuple[int, int]]:
        """The ranges before `end_offset` that were never handed out."""
        found, at = [], 0
        for start, end in [*sorted(self.seen), (end_offset, end_offset)]:
            if min(start, end_offset) > at:
                found.append((at, min(start, end_offset)))
            at = max(at, end)
        return found


class History:
    """The state of a group as its events tell it, and the rules that they broke. Takes events in the order of time."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.partitions = 0
        self._parts: dict[int, _Partition] = {}
        self._silent: set[str] = set()  # killed or stopped
        self._excused: dict[str, int] = {}  # continued and silent since; the time of its first line, 0: none yet
        self._quiet_from = 0
        self._unquiet: set[tuple[int, str]] = set()

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.time_ns > self._quiet_from:
                self._check_quiet(event.time_ns)
            getattr(self, f"_{event.event}")(event)

    def _broken(self, event: Event, text: str) -> None:
        self.violations.append(f"{event.time_ns / 1e9:.6f} {event.member} {event.event} {event.partition}: {text}")

    def _part(self, event: Event) -> _Partition:
        return self._parts.setdefault(event.partition, _Partition())

    # --- one owner, in order

    def _assigned(self, event: Event) -> None:
        part = self._part(event)
        for name, reading in part.readings.items():
            if name != event.member and not reading.ended and not reading.successor:
                reading.successor = event.member
        if not part.acknowledged <= event.offset <= part.highest_sent:
            self._broken(
                event,
                f"starts at {event.offset}: {part.acknowledged} was acknowledged, {part.highest_sent} was committed",
            )
        part.readings[event.member] = _Reading(event.offset, event.offset, event.offset)
        part.owner = event.member
        self._excused.pop(event.member, None)

    def _reading(self, event: Event) -> _Reading | None:
        """What the member reads; None, and a violation, if it does not."""
        reading = self._part(event).readings.get(event.member)
        if reading is None or reading.ended:
            self._broken(event, "it is not assigned")
            return None
        if reading.successor and not self._is_excused(event):
            self._broken(event, f"{reading.successor} was assigned it before")
        return reading

    def _is_excused(self, event: Event) -> bool:
        if event.member not in self._excused:
            return False
        first = self._excused[event.member] = self._excused[event.member] or event.time_ns
        return first == event.time_ns

    def _out(self, event: Event) -> None:
        part, reading = self._part(event), self._reading(event)
        part.see(event.offset, event.end_offset)
        if reading is None:
            return
        if event.offset != reading.next_offset:
            self._broken(event, f"offset {event.offset} comes after {reading.next_offset - 1}")
        reading.next_offset = event.end_offset
        if not self._is_excused(event):
            self._excused.pop(event.member, None)

    def _back(self, event: Event) -> None:
        reading = self._part(event).readings.get(event.member)
        if reading is not None:
            reading.back = max(reading.back, event.offset)
        self._excused.pop(event.member, None)

    def _revoked(self, event: Event) -> None:
        if (reading := self._reading(event)) is not None:
            reading.ended = True
        self._disown(event)

    def _lost(self, event: Event) -> None:
        reading = self._part(event).readings.get(event.member)
        if reading is None or reading.ended:
            self._broken(event, "it is not assigned")
        else:
            reading.ended = True
        self._disown(event)

    def _disown(self, event: Event) -> None:
        part = self._part(event)
        if part.owner == event.member:
            part.owner = ""

    # --- commits

    def _committing(self, event: Event) -> None:
        part = self._part(event)
        reading = part.readings.get(event.member)
        # A member that was not told yet of a partition commits from where it was to start, which was committed before.
        back = 0 if reading is None else reading.back
        if reading is None or reading.ended:
            back = max(back, part.highest_sent)
        if event.offset > back:
            self._broken(event, f"offset {event.offset} is past {back}, up to which records were handed back")
        part.highest_sent = max(part.highest_sent, event.offset)
        part.sent.setdefault((event.member, event.offset), []).append(part.acknowledged)

    def _committed(self, event: Event) -> None:
        part = self._part(event)
        reading = part.readings.get(event.member)
        if reading is not None and reading.successor and part.readings[reading.successor].start < event.offset:
            self._broken(event, f"offset {event.offset} was committed after {reading.successor} had begun before it")
        before = part.sent.get((event.member, event.offset))
        if not before:
            self._broken(event, f"offset {event.offset} was never sent")
        elif event.offset < min(before):
            self._broken(event, f"offset {event.offset} was sent after {min(before)} had been acknowledged")
        part.acknowledged = max(part.acknowledged, event.offset)

    # --- quiet

    def _killed(self, event: Event) -> None:
        self._silent.add(event.member)

    def _stopped(self, event: Event) -> None:
        self._silent.add(event.member)

    def _continued(self, event: Event) -> None:
        self._silent.discard(event.member)
        self._excused[event.member] = 0

    def _partitions(self, event: Event) -> None:
        self.partitions = event.offset

    def _disturbed(self, event: Event) -> None:
        self._quiet_from = max(self._quiet_from, event.time_ns + event.offset * 1_000_000)

    def unowned(self) -> list[int]:
        """The partitions that no live member reads now."""
        owners = {number: part.owner for number, part in self._parts.items()}
        return [n for n in range(self.partitions) if owners.get(n, "") in ("", *self._silent)]

    def _check_quiet(self, now_ns: int) -> None:
        for number in self.unowned():
            owner = self._parts[number].owner if number in self._parts else ""
            if (number, owner) not in self._unquiet:
                self._unquiet.add((number, owner))
                self.violations.append(f"{now_ns / 1e9:.6f} partition {number} has no live owner, but '{owner}'")

    # --- complete

    def missing(self, end_offsets: Mapping[int, int]) -> list[str]:
        """What was never handed out of all records."""
        return [
            f"partition {number}: offsets {start} to {end - 1} were never handed out"
            for number, end_offset in end_offsets.items()
            for start, end in self._parts.get(number, _Partition()).gaps(end_offset)
        ]

    def handed_out(self) -> int:
        """How many records were handed out, one as often as it was."""
        return sum(part.handed_out for part in self._parts.values())
