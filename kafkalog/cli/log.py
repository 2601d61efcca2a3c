"""`kafkalog log dump|verify`: look into a log's files without a broker. Loads `broker` when called."""

from __future__ import annotations

from pathlib import Path

import click

from kafkalog.cli.output import json_option, print_json


@click.group()
def log() -> None:
    """Look into segment files and partition folders; no broker is needed."""
