"""The simulated ZooKeeper does what a real one does: both get the same random operations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from kazoo.exceptions import KazooException

from broker.local.zookeeper import EmbeddedZooKeeper
from kafkalog.zk.session import BadVersion, Check, Create, Delete, NodeExists, NoNode, NotEmpty, Set, ZooKeeperSession
from tests.simulation.scheduler import Scheduler, threads
from tests.simulation.zookeeper import Server, sessions
from tests.waiting import waited_for

_OPERATIONS = 1000
_OUTCOMES = (NoNode, NodeExists, BadVersion, NotEmpty)


class Step(NamedTuple):
    """A call of one of two sessions."""

    session: int
    name: str
    arguments: tuple[Any, ...]
    watches: bool = False


def steps(seed: int) -> list[Step]:
    chance = random.Random(seed)
    paths = ["/a", "/b", "/a/x", "/a/y", "/b/x", "/a/x/deep"]
    versions = (-1, 0, 0, 1, 2)

    def operation() -> Any:
        path = chance.choice(paths)
        return chance.choice(
            (
                Create(path, b"%d" % chance.randrange(9), chance.random() < 0.3),
                Set(path, b"%d" % chance.randrange(99), chance.choice(versions)),
                Delete(path, chance.choice(versions)),
                Check(path, chance.choice(versions[1:])),
            )
        )

    found = []
    for _ in range(_OPERATIONS):
        session, path = chance.randrange(2), chance.choice(paths)
        watches = session == 0 and chance.random() < 0.7  # the other one is closed now and then, and may miss an event
        each = operation()
        found.append(
            chance.choice(
                (
                    Step(session, "get", (path,), watches),
                    Step(session, "get_many", (chance.sample(paths, 3),), watches),
                    Step(session, "children", (path,), watches),
                    Step(session, "exists", (path,)),
                    Step(session, "multi", ([operation() for _ in range(chance.randrange(1, 4))],)),
                    Step(session, "multi", ([operation()],)),
                    Step(session, "set", (path, b"new", chance.choice(versions))),
                    Step(session, "delete", (path, chance.choice(versions))),
                    Step(session, "multi", ([each],)),
                )
            )
        )
        if chance.random() < 0.02:
            found.append(Step(1, "close", ()))
    return found


class Seen:
    """What two sessions with one server saw."""

    def __init__(self, connect: Callable[[], ZooKeeperSession]) -> None:
        self.outcomes: list[Any] = []
        self.fired: Counter[str] = Counter()
        self._connect = connect
        self._sessions = [connect(), connect()]

    def run(self, wanted: list[Step]) -> None:
        for step in wanted:
            self.outcomes.append(self._outcome(step))
        self._sessions[0].exists("/")

    def close(self) -> None:
        for session in self._sessions:
            session.close()

    def _outcome(self, step: Step) -> Any:
        session = self._sessions[step.session]
        if step.name == "close":  # its ephemeral znodes end with it
            session.close()
            self._sessions[1] = self._connect()
            return None
        more = {"watch": self._fire} if step.watches else {}
        try:
            return self._comparable(getattr(session, step.name)(*step.arguments, **more))
        except KazooException as error:
            return type(error).__name__

    def _fire(self, path: str) -> None:
        self.fired[path] += 1

    def _comparable(self, found: Any) -> Any:
        if isinstance(found, list):
            return (
                [self._comparable(each) for each in found]
                if not found or not isinstance(found[0], str)
                else sorted(found)
            )
        if isinstance(found, tuple) and len(found) == 2:
            return found[0], self._comparable(found[1])
        if hasattr(found, "ephemeralOwner"):
            owners = [session.session_id for session in self._sessions]
            owner = owners.index(found.ephemeralOwner) if found.ephemeralOwner else None
            return found.version, found.cversion, owner, found.dataLength, found.numChildren
        return found


def of_simulation(wanted: list[Step], seed: int) -> Seen:
    scheduler = Scheduler(seed)
    server = Server(scheduler, random.Random(seed))
    seen: list[Seen] = []

    def connect() -> ZooKeeperSession:
        session = ZooKeeperSession("zk:2181/random")
        session.start()
        return session

    def main() -> None:
        seen.append(Seen(connect))
        seen[0].run(wanted)
        scheduler.sleep(1.0)

    with threads(scheduler), sessions(server):
        fiber = scheduler.spawn(scheduler.process("test"), "main", main)
        assert scheduler.run_until(lambda: fiber.is_done, 3600.0)
        scheduler.close()
    return seen[0]


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_have_the_outcomes_of_a_real_server(seed: int, zookeeper: EmbeddedZooKeeper) -> None:
    def connect() -> ZooKeeperSession:
        session = ZooKeeperSession(f"{zookeeper.connect}/random{seed}")
        session.start()
        return session

    wanted = steps(seed)
    simulated = of_simulation(wanted, seed)
    real = Seen(connect)
    real.run(wanted)
    for step, ours, theirs in zip(wanted, simulated.outcomes, real.outcomes, strict=True):
        assert ours == theirs, step
    waited_for(lambda: real.fired == simulated.fired, 10, f"{real.fired} is not {simulated.fired}")
    assert {"NoNode", "NodeExists", "BadVersion", "NotEmpty"} <= {
        str(each).removesuffix("Error") for each in real.outcomes
    }
    real.close()
