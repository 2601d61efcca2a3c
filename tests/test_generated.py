"""What is generated and committed is what its generator makes today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from broker.config import BrokerSettings
from kafkalog.config import read_properties
from kafkalog.errors import BY_CODE

ROOT = Path(__file__).resolve().parent.parent


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), ROOT / f"{path}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_protobuf_code_is_that_of_the_proto_files(tmp_path: Path) -> None:
    script("proto/generate").generate(tmp_path)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    wire = ROOT / "kafkalog" / "wire"
    kept = {path.relative_to(ROOT): path.read_text() for path in wire.iterdir() if "_pb2" in path.name}
    assert made.keys() == kept.keys()
    for path, text in made.items():
        assert kept[path] == text, f"{path} is out of date: ./run proto"


def test_documents_have_what_is_made_from_the_code() -> None:
    for path, text in script("docs/generate").generated().items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} is out of date: ./run docs"


def test_every_generated_part_is_in_a_document() -> None:
    generate = script("docs/generate")
    texts = "".join(path.read_text() for path in generate.generated() if path.suffix == ".md")
    for name in generate.PARTS:
        assert f"<!-- generated: {name} -->" in texts, f"no document lists the {name}"


def test_every_error_has_advice() -> None:
    assert script("docs/advice").ADVICE.keys() == BY_CODE.keys()


def test_every_option_of_every_command_is_explained() -> None:
    text = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    for part in ("## kafkalog topics\n", "### kafkalog topics create\n", "  --partitions", "### kafkalog log verify\n"):
        assert part in text


def test_broker_properties_uncommented_are_the_defaults() -> None:
    text = (ROOT / "conf" / "broker.properties").read_text()
    lines = [line.removeprefix("#") for line in text.splitlines() if line.startswith("#") and not line.startswith("# ")]
    given = read_properties("\n".join(lines), "broker.properties")
    assert set(given) == set(BrokerSettings.rows)
    assert dict(BrokerSettings.parse(given).items()) == dict(BrokerSettings.parse().items())


def test_constraints_are_plain_pins() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or line.count("==") == 1, line
        assert "://" not in line and "@" not in line
