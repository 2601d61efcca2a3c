"""Runs notebooks and keeps in them what they put out: `python examples/run_notebooks.py [NOTEBOOK ...]`.

A NOTEBOOK is a name, as `quickstart`, or a path. Without one it runs all of them. What Spark says on stderr when
it starts is left out: it names the machine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent / "notebooks"


def executed(path: Path, kernel: KernelManager | None = None) -> nbformat.NotebookNode:
    """A notebook with the outputs of a run of it, in its own folder and a kernel of its own if none is given. Raises
    CellExecutionError."""
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    here = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, kernel, timeout=240, kernel_name="python3", resources=here, record_timing=False).execute()
    notebook.metadata = nbformat.from_dict(metadata)  # the kernel adds its versions
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def named(text: str) -> Path:
    """The notebook of that name or path. Raises SystemExit, which names those that there are."""
    for path in (Path(text), NOTEBOOKS / text, NOTEBOOKS / f"{text}.ipynb"):
        if path.is_file():
            return path
    there_are = ", ".join(sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
    raise SystemExit(f"there is no notebook '{text}'; there are: {there_are}")


def main() -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for path in [named(text) for text in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb")):
        print(path.name)
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
