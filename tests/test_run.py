"""The `run` script of a checkout, with a Python that only records what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_PYTHON = """#!/bin/sh
case "$*" in
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip install "*)
    echo installing >>"$RECORD"
    read -r line <"$GO_ON"
    ;;
esac
"""


# Debian has flock, so CI never skips this. A system without it has nothing to test: ./run takes no turns there.
@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock ./run takes no turns")
def test_a_second_set_up_waits_for_the_first_and_finds_its_work_done(tmp_path: Path) -> None:
    for name in ("run", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python, record, go_on = tmp_path / "a-python", tmp_path / "record", tmp_path / "go-on"
    python.write_text(_PYTHON)
    python.chmod(0o755)
    os.mkfifo(go_on)
    environment = {**os.environ, "KAFKALOG_PYTHON": str(python), "RECORD": str(record), "GO_ON": str(go_on)}

    def setup() -> subprocess.Popen[str]:
        return subprocess.Popen([tmp_path / "run", "setup"], env=environment, stderr=subprocess.PIPE, text=True)

    with setup() as first, open(go_on, "w") as release, setup() as second:  # the pipe opens once the first one installs
        try:
            assert second.stderr is not None
            assert second.stderr.readline() == "run: waiting for another ./run that sets up .venv\n"
            release.write("go on\n")
            release.close()
            assert first.wait(60) == second.wait(60) == 0
            assert second.stderr.read() == "run: .venv is ready; to use it: . .venv/bin/activate\n"
        finally:
            first.kill()
            second.kill()
    assert record.read_text() == "installing\n"


_WITHOUT_VENV = """#!/bin/sh
case "$*" in
"-m venv "*) [ -e "$INSTALLED" ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m virtualenv "*) exit 1 ;;
*print*) echo 3.13 ;;
esac
"""
_SUDO = """#!/bin/sh
[ "$1" != -n ] || exit 0
echo "sudo does: $*" >>"$SAID"
exec "$@"
"""


def test_what_is_installed_as_root_is_said_before_with_what_it_is_for(tmp_path: Path) -> None:
    for name in ("run", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    commands = {
        "a-python": _WITHOUT_VENV,
        "id": "#!/bin/sh\necho 1000\n",
        "sudo": _SUDO,
        "apt-get": '#!/bin/sh\n[ "$1" = update ] || touch "$INSTALLED"\n',
    }
    for name, program in commands.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    said = tmp_path / "said"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "KAFKALOG_PYTHON": str(tmp_path / "a-python"),
        "INSTALLED": str(tmp_path / "installed"),
        "SAID": str(said),
    }
    with said.open("a") as stderr:
        subprocess.run([tmp_path / "run", "setup"], env=environment, stderr=stderr, timeout=60, check=True)
    install = "env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3.13-venv"
    assert said.read_text().splitlines()[1:-2] == [
        "run: to get Python's venv module: sudo apt-get update -qq",
        "sudo does: apt-get update -qq",
        f"run: to get Python's venv module: sudo {install}",
        f"sudo does: {install}",
    ]


def test_a_task_that_is_none_is_named() -> None:
    ran = subprocess.run([ROOT / "run", "tets"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr.startswith("run: there is no task 'tets'\nusage: ./run TASK")
