"""README's ten lines and the notebooks, run whole as their readers run them."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from examples import run_notebooks

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.java, pytest.mark.timeout(600)]  # Spark starts cold, perhaps on a busy machine


def test_readmes_ten_lines_run() -> None:
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-5000:]
    [row] = [line for line in ran.stdout.splitlines() if "greetings" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["[77 6F 72 6C 64]", "[68 65 6C 6C 6F]"], "show() prints bytes in hex: world, hello"


def said(notebook: nbformat.NotebookNode) -> dict[str, tuple[str, set[str]]]:
    """By cell, the text of its outputs, without the port that a cluster found free, and of which kinds they are."""
    found = {}
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        assert all(output.output_type != "error" for output in outputs)
        text = "".join(output.get("text") or output.data["text/plain"] for output in outputs)
        kinds = {kind for output in outputs for kind in output.get("data", {})}
        found[cell.id] = re.sub(r"127\.0\.0\.1:\d+", "a broker", text), kinds
    return found


each_notebook = pytest.mark.parametrize(
    "path", sorted(run_notebooks.NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem
)


def test_notebooks_are_named_with_or_without_their_folder_and_a_wrong_name_says_which_there_are() -> None:
    quickstart = run_notebooks.NOTEBOOKS / "quickstart.ipynb"
    assert run_notebooks.named("quickstart") == run_notebooks.named("quickstart.ipynb") == quickstart
    assert run_notebooks.named(str(quickstart)) == quickstart
    with pytest.raises(SystemExit, match=r"there is no notebook 'quick'; there are: .*quickstart"):
        run_notebooks.named("quick")


@pytest.fixture(scope="module")
def shared_kernel() -> Iterator[KernelManager]:
    """A kernel with a Java that has no settings: those that start it would be defaults of every session in it."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path}
    kernel = KernelManager(kernel_name="python3")
    kernel.start_kernel(
        cwd=str(run_notebooks.NOTEBOOKS), env=environment, extra_arguments=["--HistoryManager.hist_file=:memory:"]
    )
    run_cell(kernel, "from pyspark import SparkContext; SparkContext._ensure_initialized()")
    yield kernel
    kernel.shutdown_kernel()


def run_cell(kernel: KernelManager, code: str) -> None:
    NotebookClient(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), kernel, timeout=240).execute()


@pytest.fixture
def kernel(shared_kernel: KernelManager) -> KernelManager:
    """A kernel without names, in which no Spark runs: as its own, but for the seconds that Java takes to start."""
    stopped = "from pyspark import SparkContext\nassert SparkContext._active_spark_context is None"
    run_cell(shared_kernel, f"{stopped}\n%reset -f")
    return shared_kernel


@each_notebook
def test_a_notebook_runs_to_its_end_draws_and_says_what_is_committed_of_it(path: Path, kernel: KernelManager) -> None:
    notebook = run_notebooks.executed(path, kernel)
    assert said(notebook) == said(nbformat.read(path, as_version=4))
    images = [
        output["data"]["image/png"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert images and all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)


@each_notebook
def test_what_is_committed_of_a_notebooks_run_is_small_and_names_no_machine(path: Path) -> None:
    outputs = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", [])]
    bytes_max = 300_000 if path.stem == "benchmarks" else 100_000  # that is plots alone
    assert outputs and len(json.dumps(outputs)) < bytes_max
    text = "".join(output.get("text") or output.data["text/plain"] for output in outputs)
    assert not re.findall(r"(?<![\w.])/(?:home|root|Users|tmp|usr|opt|var|work)\b|hostname|localhost", text)
