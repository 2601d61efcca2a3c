"""The built wheel alone, in a virtual environment outside the checkout: the command runs, Spark finds the format."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.borrowed_environment import borrowed_environment
from tests.free_ports import free_ports

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.timeout(600)  # Spark starts cold, perhaps on a busy machine
PACKAGES = ("kafkalog", "broker", "pyspark_kafkalog")

JOB = """
import sys
from pyspark.sql import SparkSession
import kafkalog
assert not kafkalog.__file__.startswith(sys.argv[2]), kafkalog.__file__
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
options = {"kafkalog.bootstrap.servers": sys.argv[1]}
rows = spark.createDataFrame([("k", "from the wheel")], "key string, value string")
rows.write.format("kafkalog").options(**options, topic="t").mode("append").save()
[row] = spark.read.format("kafkalog").options(**options, subscribe="t").load().collect()
print(bytes(row.value).decode())
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is installed, to build in."""
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*command, str(source)], check=True, timeout=120)
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment's bin: the wheel is installed in it, and what it requires is borrowed from ours."""
    home = tmp_path_factory.mktemp("installed")
    borrowed_environment(home)
    install(home, str(wheel))
    return home / "bin"


def install(home: Path, *what: str) -> None:
    """Install into a borrowed environment."""
    command = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--quiet", "--no-deps"]
    options = ["--no-index", "--no-build-isolation", "--ignore-installed"]
    subprocess.run([*command, *options, *what], check=True, timeout=120, env=without_the_checkout())


def without_the_checkout() -> dict[str, str]:
    """Variables for a Python that does not have the checkout on its path (an earlier test's Spark puts it there)."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.java
def test_spark_finds_the_format_of_an_editable_install(source: Path, tmp_path: Path) -> None:
    borrowed_environment(tmp_path)
    install(tmp_path, "--editable", str(source))
    program = "import pkgutil; print([m.name for m in pkgutil.iter_modules() if m.name.startswith('pyspark_k')])"
    command = [str(tmp_path / "bin" / "python"), "-P", "-c", program]
    listed = subprocess.run(
        command, env=without_the_checkout(), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert listed.stdout.strip() == "['pyspark_kafkalog']"


def test_the_wheel_has_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        text = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    packed = {name for name in names if ".dist-info/" not in name}
    wanted = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert packed - {name for name in packed if name.endswith(".pyi")} == wanted
    assert "License-Expression: Apache-2.0" in text and "Requires-Python: >=3.11" in text
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.java
def test_the_wheel_alone_runs_a_cluster_and_spark_finds_it(installed: Path, tmp_path: Path) -> None:
    port = free_ports(2)
    ours = ("PYTHONPATH", "SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_DRIVER_PYTHON")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"PYSPARK_PYTHON": str(installed / "python"), "KAFKALOG_BOOTSTRAP": f"127.0.0.1:{port}"}
    common: dict[str, Any] = {"env": environment, "cwd": tmp_path, "text": True}
    command = [str(installed / "kafkalog"), "local", "--port", str(port)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **common) as local,
        ExitStack() as stack,
    ):
        stack.callback(local.kill)
        assert local.stdout is not None
        assert local.stdout.readline() == f"bootstrap servers: 127.0.0.1:{port}\n"
        kafkalog = [str(installed / "kafkalog")]
        subprocess.run([*kafkalog, "topics", "create", "t"], check=True, timeout=60, capture_output=True, **common)
        told = subprocess.run([*kafkalog, "doctor"], timeout=120, capture_output=True, **common)
        assert told.returncode == 0, told.stdout + told.stderr
        job = [str(installed / "python"), "-c", JOB, f"127.0.0.1:{port}", str(ROOT)]
        ran = subprocess.run(job, timeout=180, capture_output=True, **common)
        assert ran.returncode == 0, ran.stderr[-5000:]
        assert ran.stdout.strip().endswith("from the wheel")
        local.terminate()
        assert local.wait(60) == 0
