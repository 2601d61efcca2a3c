"""Explores a model breadth first: every state that its steps can reach. Knows no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol, TypeVar

_State = TypeVar("_State", bound=Hashable)


class Violation(Exception):
    """An invariant does not hold."""


class Model(Protocol[_State]):
    def start(self) -> _State: ...

    def successors(self, state: _State) -> Iterator[tuple[str, _State]]:
        """Each step that a state allows, and the state after it. Raises Violation."""

    def check(self, state: _State) -> None:
        """Raises Violation."""

    def phases(self, state: _State) -> set[str]:
        """Names of what has been reached in a state, by which a test sees that a world shows what it is for."""


class Found(NamedTuple):
    """What an exploration came to: the violation, if any, and the steps to it."""

    states: int
    phases: frozenset[str]
    violation: str
    steps: tuple[str, ...]


def explore(model: Model[_State], states_max: int = 1_000_000) -> Found:
    """Look at every state that can be reached, nearest first, until one violates an invariant."""
    first = model.start()
    came_from: dict[_State, tuple[_State, str] | None] = {first: None}
    waiting = deque([first])
    phases: set[str] = set()

    def steps(state: _State) -> tuple[str, ...]:
        found = []
        while (origin := came_from[state]) is not None:
            state, step = origin
            found.append(step)
        return tuple(reversed(found))

    while waiting:
        state = waiting.popleft()
        try:
            model.check(state)
            for step, after in model.successors(state):
                if after not in came_from:
                    came_from[after] = (state, step)
                    waiting.append(after)
        except Violation as violation:
            return Found(len(came_from), frozenset(phases), str(violation), steps(state))
        phases.update(model.phases(state))
        assert len(came_from) < states_max, "the world is too large"
    return Found(len(came_from), frozenset(phases), "", ())
