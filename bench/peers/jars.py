"""Jars by their Maven coordinates, through the Ivy that lies in pyspark.

They come from where Ivy's own settings say (Maven Central), and stay in the cache that Spark's `--packages` uses.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from bench.measure import NotAvailable
from broker.local.zookeeper import find_java


class Artifact(NamedTuple):
    """Coordinates ("group:name:version"), and whether what it needs in turn is to come too."""

    coordinates: str
    transitive: bool = True


def patience_seconds(scale: float) -> float:
    """How long a benchmark waits for jars. A small run is a test's."""
    return 300.0 if scale >= 0.1 else 45.0


def jars(whose: str, artifacts: tuple[Artifact, ...], timeout: float) -> list[str]:
    """Paths of the jars of some artifacts, fetched if need be within so many seconds.

    Args:
        whose: as the error names them.

    Raises:
        NotAvailable: they cannot be had from here.
    """
    with tempfile.TemporaryDirectory(prefix="kafkalog-ivy-") as folder:
        wanted, found = Path(folder, "ivy.xml"), Path(folder, "classpath")
        wanted.write_text(_ivy_module(artifacts))
        cache = Path.home() / ".ivy2.5.2" / "cache"
        command = [find_java(), "-jar", _ivy_jar(), "-warn", "-cache", str(cache), "-ivy", str(wanted)]
        command += ["-confs", "default", "-cachepath", str(found)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise NotAvailable(f"{whose}'s jars had not all come after {timeout:g} s") from None
        if ran.returncode or not found.exists():
            missing = [line.strip(" :\t") for line in ran.stdout.splitlines() if line.rstrip().endswith(": not found")]
            raise NotAvailable(
                f"{whose}'s jars cannot be had from here: {'; '.join(dict.fromkeys(missing)) or ran.stderr}"
            )
        return found.read_text().strip().split(os.pathsep)


def _ivy_module(artifacts: tuple[Artifact, ...]) -> str:
    lines = []
    for artifact in artifacts:
        org, name, rev = map(quoteattr, artifact.coordinates.split(":"))
        conf, transitive = ("default", "true") if artifact.transitive else ("master", "false")
        lines.append(
            f'<dependency org={org} name={name} rev={rev} conf="default-&gt;{conf}" transitive="{transitive}"/>'
        )
    return (
        '<ivy-module version="2.0"><info organisation="kafkalog" module="bench"/>'
        f'<configurations><conf name="default"/></configurations><dependencies>{"".join(lines)}</dependencies>'
        "</ivy-module>"
    )


def _ivy_jar() -> str:
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "jars"
    found = sorted(folder.glob("ivy-*.jar"))
    if not found:
        raise NotAvailable(f"there is no Ivy among pyspark's jars in {folder}, to get others with")
    return str(found[-1])
