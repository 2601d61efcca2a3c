"""A process by a name that no other process has, ever, and whether the process so named has ended. Linux's /proc.

A number alone is not enough: it is given again, and means something else after a boot and in another container.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def own_name() -> str:
    """This process's name; '' where there is no /proc to make it from."""
    try:
        return f"{_namespace()} {os.getpid()} {_state_and_start(os.getpid())[1]}"
    except OSError:
        return ""


def has_ended(name: str) -> bool:
    """Whether the process of that name is known to be no more: it was one of this machine and of this container."""
    namespace, _, rest = name.partition(" ")
    number, _, start = rest.partition(" ")
    try:
        if namespace != _namespace() or not number.isdecimal():
            return False
    except OSError:
        return False
    try:
        state, started = _state_and_start(int(number))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return started != start or state in "ZX"


def _namespace() -> str:
    """An id that differs between boots of a machine and between containers on it."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.stat(_PROC / 'self/ns/pid').st_ino}"


def _state_and_start(number: int) -> tuple[str, str]:
    fields = (_PROC / str(number) / "stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]  # state and starttime of proc(5), whose second field, in brackets, may hold anything
