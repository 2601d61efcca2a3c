"""Virtual environments that cost a second: what this Python has installed is borrowed, not installed again."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def borrowed_environment(home: Path) -> Path:
    """Make a virtual environment in a folder; its site-packages, where what is its own can be put."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=120)
    [packages] = home.glob("lib/python*/site-packages")
    # Only a path: what is installed editable there (the checkout) is found by .pth files, which are not read from here.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return packages
