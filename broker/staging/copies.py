"""What leader and follower tell each other of the files of staged data, and what follows from it. Pure.

The files with frames are written one after the other, and what is in one may need what is in those before it: a
follower has them in their order. A part's file is written beside them, and is copied side by side with them: what is in
it is placed by the numbers of its batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from broker.staging.part import StagedFile


class StagedCopy(NamedTuple):
    """A file of staged data: its number, its salt, how many bytes it has, and the part whose file it is (empty: it has
    frames). The salt is there because a leader that restarts may use the number of a removed file again."""

    number: int
    salt: int
    size: int
    part: bytes = b""


class StagedPiece(NamedTuple):
    """Bytes of a file that a follower lacks."""

    file: StagedFile
    position: int
    length: int


class Lacking(NamedTuple):
    """What a follower lacks.

    Attributes:
        reached: up to which `Staging.staged_end` it has everything; -1: it lacks something from before this process, or
            has what its leader does not have.
        files: the leader's, if the follower has to remove or cut copies, else None.
        pieces: the next that it lacks.
    """

    reached: int
    files: list[StagedCopy] | None
    pieces: list[StagedPiece]


def agreed_copies(leader: Iterable[StagedCopy], follower: Iterable[StagedCopy]) -> list[StagedCopy]:
    """What a follower keeps of its copies, the oldest first: what is the beginning of a file of its leader. Of those
    with frames, it keeps none after the first that it lacks something of."""
    has = {(copy.number, copy.salt): copy.size for copy in follower}
    kept = []
    in_order = True
    for copy in sorted(leader):
        here = has.get((copy.number, copy.salt), 0)
        if here and (in_order or copy.part):
            kept.append(copy._replace(size=min(here, copy.size)))
        if here < copy.size and not copy.part:
            in_order = False
    return kept
