"""`python -m broker --config FILE`: run one broker. `kafkalog broker` does the same for people.

It ends with code 74 (EX_IOERR) if its data directory failed during the start, with 75 (EX_TEMPFAIL) if the disk hung at
any time, and with 1 after any other error. A process supervisor needs this difference, because it must not restart the
broker after the first.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from broker.server import read_config, run
from kafkalog.errors import KafkalogError, StorageFailed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m broker", description="Run one kafkalog broker.")
    parser.add_argument("--config", type=Path, required=True, help="file of name=value settings")
    parser.add_argument("--announce", action="store_true", help="print ports and pid as JSON once it serves")
    parser.add_argument("--hold", action="store_true", help="start when a line comes on standard input")
    arguments = parser.parse_args()
    if arguments.hold and not sys.stdin.readline():
        return 0
    try:
        run(read_config(arguments.config), announces=arguments.announce)
    except KafkalogError as error:
        print(f"broker: {error}", file=sys.stderr)
        return os.EX_IOERR if isinstance(error, StorageFailed) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
