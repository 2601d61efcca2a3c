"""A follower's log that copies a leader's, without sockets: the protocol of docs/REPLICATION.md in short."""

from __future__ import annotations

from broker.storage.log import Log


def fetch(follower: Log, leader: Log, leader_epoch: int, max_bytes: int = 1 << 20) -> int:
    """Copy one slice of the leader's log; returns the follower's new end offset."""
    with leader.reader.read(follower.end_offset, max_bytes) as found:
        return follower.append_stamped(memoryview(found.read()), leader_epoch)


def agree(follower: Log, leader: Log) -> None:
    """Cut the follower's log until it does not diverge from the leader's (KIP-101, KIP-279)."""
    for _ in range(100):
        last = follower.last_epoch
        epoch, end_offset = leader.epoch_end(last)
        if epoch == last and follower.end_offset <= end_offset and follower.end_offset >= leader.start_offset:
            return
        cut_to = min(follower.epoch_end(epoch)[1], end_offset)
        if cut_to < max(follower.start_offset, leader.start_offset):
            follower.reset_to(leader.start_offset)
        else:
            follower.truncate_to(cut_to)
    raise AssertionError("the logs never agree")


def catch_up(follower: Log, leader: Log, leader_epoch: int, max_bytes: int = 700) -> None:
    """Follow a leader up to its end."""
    follower.follow_epoch(leader_epoch)
    agree(follower, leader)
    if follower.lacks_producers:
        assert follower.take_producers(leader.producers_before(follower.end_offset))
    while follower.end_offset < leader.end_offset:
        before = follower.end_offset
        assert fetch(follower, leader, leader_epoch, max_bytes) > before


def bytes_of(log: Log) -> bytes:
    """All bytes of a log from its start offset on, whatever its segments are."""
    found, offset = [], log.start_offset
    while offset < log.end_offset:
        with log.reader.read(offset, 1 << 30) as part:
            found.append(part.read())
        later = [base for base in log.view.bases if base > offset]
        offset = min(later, default=log.end_offset)
    return b"".join(found)
