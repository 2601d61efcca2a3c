"""Producer ids: those that brokers hand out, and those that follow from a transaction's name. Pure, but for chance.

    bits 62     0: handed out by a broker, the rest is random; 1: a transaction's
         31-62  a transaction's: its family, bit 62 included; from the SHA-256 of its name, or for a numbered write of
                the application's
          0-30  a transaction's: its own within the family

What tasks stage of one write they stage for one family: that of the write's only transaction, or, of a numbered write,
that of its application, whose transactions are one for each topic. A task may have met few of the topics, or none yet;
by family and batch it names, and brokers find, all that is staged of its write (`client/transaction/renewal.py`).
"""

from __future__ import annotations

import hashlib
import secrets

from kafkalog.format import numbered

_TRANSACTIONAL = 1 << 62
_FAMILY_SHIFT = 31
_OWN_MASK = (1 << _FAMILY_SHIFT) - 1


def new_producer_id() -> int:
    """The id of a producer that has none yet: random, so that nothing has to remember which were given out.

    A counter in ZooKeeper gave ids out again once ZooKeeper was set back to a backup. Logs still knew the batches of
    those that had had the ids, and took equal sequences for theirs: acknowledged, and not written. Of a million random
    ones, two are the same once in nine million times.
    """
    return secrets.randbelow(_TRANSACTIONAL)


def producer_id_of(transactional_id: str) -> int:
    """The producer id that a transaction's batches carry: the same for every run, and none that a broker hands out,
    for those are smaller.

    Leaders distinguish the transactions of a partition by it. There an application's differ in their generation only,
    so those of one count follow each other: none of them meets another.
    """
    name = numbered.parse(transactional_id)
    if name is None:
        return _id_of(transactional_id)
    own = _id_of(numbered.transactional_id(name.app_id, name.topic, name.topic_id)) + name.generation
    return family_of_application(name.app_id) << _FAMILY_SHIFT | own & _OWN_MASK


def family_of(producer_id: int) -> int:
    """The family of a transaction's producer id."""
    return producer_id >> _FAMILY_SHIFT


def family_of_application(app_id: str) -> int:
    """The family of the producer ids of an application's numbered writes."""
    return family_of(_id_of(numbered.PREFIX + app_id))


def _id_of(name: str) -> int:
    return _TRANSACTIONAL | int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2
