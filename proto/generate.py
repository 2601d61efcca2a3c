"""Make kafkalog/wire/*_pb2* from the .proto files beside this one: `./run proto`.

Messages only: what gRPC needs of the service is read off its descriptor (kafkalog/wire/service.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROTO = Path(__file__).resolve().parent
ROOT = PROTO.parent


def generate(out: Path) -> None:
    """Write the generated modules below `out`, in the package's folders."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}"]
    command += [f"--python_out={out}", f"--pyi_out={out}"]
    subprocess.run([*command, *(str(path) for path in sorted(PROTO.rglob("*.proto")))], check=True)


if __name__ == "__main__":
    generate(ROOT)
