"""The docs tell the truth of the code: every `path` and every `file:name` that they print exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_REFERENCE = re.compile(
    r"`((?:kafkalog|broker|pyspark_kafkalog|tests|proto|conf|examples|bench|docs)/[\w./-]*)(?::([A-Za-z_][\w.]*))?`"
)


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def faults(text: str) -> list[str]:
    found = []
    for path, name in _REFERENCE.findall(text):
        if not (ROOT / path).exists():
            found.append(f"{path} does not exist")
        elif name and name not in names_in(ROOT / path):
            found.append(f"{path} has no {name}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert faults(page.read_text()) == []


def test_a_wrong_name_is_found() -> None:
    assert faults("`kafkalog/clock.py:Clock.now_us` and `kafkalog/clock.py:Sundial` and `broker/nowhere.py`") == [
        "kafkalog/clock.py has no Sundial",
        "broker/nowhere.py does not exist",
    ]


def test_the_architecture_names_both_paths() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    assert len([name for _, name in _REFERENCE.findall(page) if name]) > 40
