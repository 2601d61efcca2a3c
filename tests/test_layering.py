"""The import rules, read from the source: layers go one way, heavy or single-purpose imports stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafkalog.zk import paths as znodes

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kafkalog", "broker", "pyspark_kafkalog")

LAYERS = {
    "kafkalog": [
        ["errors", "config", "clock", "records", "events", "retry", "threads", "versions"],
        ["assignors", "patterns"],
        ["format"],
        ["wire"],
        ["zk"],
        ["net"],
        ["client"],
        ["aio"],
        ["cli"],
    ],
    "broker": [
        ["config", "folder_lock", "ports", "signals", "announce"],
        ["storage"],
        ["staging"],
        ["states"],
        ["replica"],
        ["controller"],
        ["groups"],
        ["requests"],
        ["transport"],
        ["server"],
        ["local"],
        ["commands"],
        ["__main__"],
    ],
    "pyspark_kafkalog": [
        ["processes", "connections", "columns", "times", "offsets", "sentences", "idle_workers"],
        ["options"],
        ["read"],
        ["write"],
        ["source", "sink", "lag"],
        ["datasource", "streaming_write"],
        ["daemon"],
    ],
}
"""A module may import what stands in its own row or above it."""


FORBIDDEN = {
    "kafkalog": ("broker", "pyspark_kafkalog", "pyspark"),
    "broker": ("kafkalog.client", "kafkalog.cli", "pyspark_kafkalog", "pyspark"),
    "pyspark_kafkalog": ("broker", "kafkalog.cli"),
}
ALLOWED = {"broker.commands": ("kafkalog.cli",)}
"""What a part of a package may import although the package may not."""

HEAVY = ("grpc", "pyarrow", "google.protobuf", "kazoo", "numpy")


def source_files() -> list[Path]:
    return [
        path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    ]


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in source_files()}
GENERATED = {module_name(path) for package in PACKAGES for path in (ROOT / package).rglob("*_pb2*.py")}


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(module, line, at module level) of every import; `from package import module` names the module."""

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            inner = top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            inner = inner and not _type_checking(child)
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, child.lineno, inner
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: imports are absolute here"
                assert child.module is not None
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    yield (whole if whole in MODULES or whole in GENERATED else child.module), child.lineno, inner
            else:
                yield from walk(child, inner)

    yield from walk(ast.parse(path.read_text()), True)


def row_of(module: str) -> int | None:
    """The layer of a module; None for a package itself, whose names are loaded when asked for."""
    package, _, rest = module.partition(".")
    if not rest or package not in LAYERS:
        return None
    for row, names in enumerate(LAYERS[package]):
        if rest.split(".")[0] in names:
            return row
    raise AssertionError(f"{module} has no place in the layers: give it one in {Path(__file__).name}")


def within(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def test_the_architecture_page_has_the_layers() -> None:
    page = " ".join((ROOT / "docs" / "ARCHITECTURE.md").read_text().split())
    for package, rows in LAYERS.items():
        assert f" {package}: {' < '.join(map(', '.join, rows))} " in page


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_its_own_layer_and_those_below(module: str) -> None:
    package = module.split(".")[0]
    own = row_of(module)
    wrong = []
    for imported, line, _ in imports(MODULES[module]):
        if within(imported, FORBIDDEN[package]):
            if not any(within(module, (part,)) and within(imported, names) for part, names in ALLOWED.items()):
                wrong.append(f"line {line}: {imported} is not for {package}")
        elif own is not None and imported.split(".")[0] == package:
            row = row_of(imported)
            if row is not None and row > own:
                wrong.append(f"line {line}: {imported} stands above {module}")
    assert not wrong, f"{module}: " + "; ".join(wrong)


def test_no_import_cycle() -> None:
    graph = {
        module: {name for name, _, top in imports(path) if top and name in MODULES and name != module}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize(
    "library, only",
    [("kazoo", ("kafkalog.zk.client", "kafkalog.zk.session")), ("click", ("kafkalog.cli", "broker.commands"))],
)
def test_a_library_is_imported_in_one_place(library: str, only: tuple[str, ...]) -> None:
    users = {
        module for module, path in MODULES.items() for name, _, _ in imports(path) if name.split(".")[0] == library
    }
    assert users, f"nothing imports {library}: is the rule out of date?"
    assert all(within(module, only) for module in users), users


def _calls(path: Path, names: set[str]) -> list[int]:
    tree = ast.parse(path.read_text())
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
    ]


def test_the_log_reaches_the_disk_through_one_module() -> None:
    syncs = {"fsync", "fdatasync"}
    changes = syncs | {"writev", "pwrite", "pwritev", "unlink", "remove", "rename", "replace", "truncate", "ftruncate"}
    storage = {module: path for module, path in MODULES.items() if module.startswith("broker.")}
    assert _calls(storage["broker.storage.disk"], syncs)
    for module, path in storage.items():
        if module != "broker.storage.disk":
            assert not _calls(path, syncs), f"{module} syncs by itself"
            if module.startswith("broker.storage."):
                assert not _calls(path, changes), f"{module} changes files by itself"


def test_znode_paths_stand_in_one_module() -> None:
    whole = (znodes.CLUSTER, *znodes.PERMANENT)
    roots = tuple({f"/{path.split('/')[1]}" for path in whole})
    for module, path in MODULES.items():
        if module == "kafkalog.zk.paths":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith(roots), f"{module}:{node.lineno} spells a znode path"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is(module: str) -> None:
    text = MODULES[module].read_text()
    assert text == "" or ast.get_docstring(ast.parse(text)), f"{module} has no docstring"
    assert not {"utils", "helpers", "common"} & set(module.split("."))


@pytest.mark.parametrize(
    "module, heavy",
    [
        ("kafkalog", (*HEAVY, "asyncio")),
        ("kafkalog.cli.main", (*HEAVY, "pyspark", "broker", "rich.table")),
        ("broker.commands.servers", (*HEAVY, "broker.server", "broker.storage", "broker.local")),
        ("broker.commands.log", (*HEAVY, "broker.storage")),
        ("pyspark_kafkalog", ("grpc", "kazoo", "google.protobuf", "kafkalog.client", "pandas")),
    ],
)
def test_importing_it_stays_light(module: str, heavy: tuple[str, ...]) -> None:
    program = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
