"""Producer ids: those that brokers assign, and those derived from a transaction's name. Pure, except for random bits.

    bits 62     0: handed out by a broker, the rest is random; 1: a transaction's
         31-62  a transaction's: its family, bit 62 included; from the SHA-256 of its name, or for a numbered write of
                the application's
          0-30  a transaction's: its own within the family

All parts of one write are staged for one family: that of the write's only transaction, or, for a numbered write, that
of its application, which has a transaction for each topic. A task may know few of the write's topics, or none yet. With
the family and the batch id it still names all staged parts of its write (`client/transaction/renewal.py`).
"""

from __future__ import annotations

import hashlib
import secrets

from kafkalog.format import numbered

_TRANSACTIONAL = 1 << 62
_FAMILY_SHIFT = 31
_OWN_MASK = (1 << _FAMILY_SHIFT) - 1


def new_producer_id() -> int:
    """The id of a producer that has none yet. It is random, so that assigned ids need not be stored.

    A counter in ZooKeeper assigned ids twice after ZooKeeper was restored from a backup. Logs still had the state of
    the ids' first producers, and took batches with equal sequences for duplicates: they were acknowledged and not
    written. Among a million random ids, two are the same once in nine million times.
    """
    return secrets.randbelow(_TRANSACTIONAL)


def producer_id_of(transactional_id: str) -> int:
    """The producer id of a transaction's batches. It is the same for every run, and larger than those that brokers
    assign.

    Leaders distinguish the transactions of a partition by it. In a partition an application's transactions differ only
    in their generation, and only one generation is in use at a time.
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
