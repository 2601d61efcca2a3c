"""Java programs that load a peer: its own, or those of one source file that lie in the folder `java`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bench.measure import NotAvailable
from broker.local.zookeeper import find_java, with_parent

SOURCES = Path(__file__).parent / "java"
_TIMEOUT = 900.0


def java_command(jars: list[str], program: str | Path, arguments: tuple[object, ...], *options: str) -> list[str]:
    """Args: program: a class in the jars, or a source file."""
    return [find_java(), *options, "-cp", os.pathsep.join(jars), str(program), *map(str, arguments)]


def output_of(whose: str, command: list[str]) -> str:
    """What a program prints. Raises NotAvailable: it fails, or has not ended after a quarter of an hour."""
    try:
        ran = subprocess.run(with_parent(command), capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"{whose}'s client had not ended after {_TIMEOUT:g} s") from None
    if ran.returncode:
        said = (ran.stderr.strip() or ran.stdout.strip() or "nothing").splitlines()
        raise NotAvailable(f"{whose}'s client fails here: {said[0]}")
    return ran.stdout
