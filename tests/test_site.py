"""The site is built of the documents without a warning: each page is in it, each link and name leads somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stderr
    home = (tmp_path / "index.html").read_text()
    assert 'href="tutorial/exactly-once.html"' in home and 'href="CONTRIBUTING.html"' in home
    reference = (tmp_path / "reference" / "python.html").read_text()
    assert "send_arrow" in reference and "send_and_wait" in reference
