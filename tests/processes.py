"""How tests are shared out among pytest-xdist's processes (`-n 3`): module by module, so that what a module's fixtures
start is started once; and all modules that use Spark to one process, so that it starts once too."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent


@cache
def uses_spark(module: Path) -> bool:
    """Whether a test of it takes the fixture `spark`, by its text: the process that shares out has no more."""
    return "spark: SparkSession" in module.read_text()


class ByModule(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::")[0]
        return "spark" if uses_spark(ROOT / module) else module


def put_in_order(items: list[pytest.Item], pure: set[pytest.Item]) -> None:
    """The modules with Spark begin: theirs is the longest share. The pure ones come last, and fill the gaps."""
    with_java = {item.path for item in items if item not in pure}
    items.sort(key=lambda item: (not uses_spark(item.path), item.path not in with_java))
