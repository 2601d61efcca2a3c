"""Make kafkalog/wire/*_pb2* from the .proto files beside this one: `./run proto`.

The data port's messages have no service, so of dataport.proto no gRPC module is kept.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROTO = Path(__file__).resolve().parent
ROOT = PROTO.parent
_SERVICE_NOTE = """\
# Made by protoc: ./run proto. The methods of BrokerServicer that raise NotImplementedError are its placeholders for
# what a server leaves out. The broker leaves out none: tests/test_generated.py holds broker/transport/rpc.py to that.
"""


def generate(out: Path) -> None:
    """Write the generated modules below `out`, in the package's folders."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}"]
    command += [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    subprocess.run([*command, *(str(path) for path in sorted(PROTO.rglob("*.proto")))], check=True)
    wire = out / "kafkalog" / "wire"
    (wire / "dataport_pb2_grpc.py").unlink()
    service = wire / "broker_pb2_grpc.py"
    service.write_text(_SERVICE_NOTE + service.read_text())


if __name__ == "__main__":
    generate(ROOT)
