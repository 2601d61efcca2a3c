"""Make what is generated in the documents and in conf/ again from the code: `./run docs`.

A document has `<!-- generated: NAME -->` and `<!-- end -->`; what stands between them is replaced. Everything comes
from the tables of settings and options, so that a new row is documented by being there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from broker.config import BrokerSettings, TopicSettings  # noqa: E402
from kafkalog.client.config import ClientSettings, ConsumerSettings, ProducerSettings  # noqa: E402
from pyspark_kafkalog import options  # noqa: E402

TABLES: dict[str, Callable[[], str]] = {
    "broker settings": BrokerSettings.markdown,
    "topic settings": TopicSettings.markdown,
    "client settings": ClientSettings.markdown,
    "producer settings": ProducerSettings.markdown,
    "consumer settings": ConsumerSettings.markdown,
    "spark options": options.markdown,
}
_PART = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """A document with its generated parts made again."""
    return _PART.sub(lambda part: f"{part[1]}\n{TABLES[part[2]]()}\n{part[3]}", text)


def broker_properties() -> str:
    head = "# A broker's settings, each at its default: uncomment what you change. `kafkalog broker --config FILE`.\n"
    return f"{head}\n{BrokerSettings.properties_text()}"


def generated() -> dict[Path, str]:
    """Every file that is made, or has parts that are, with the text that it should have."""
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {path: with_tables(path.read_text()) for path in documents if path.exists()}
    texts[ROOT / "conf" / "broker.properties"] = broker_properties()
    return texts


if __name__ == "__main__":
    for path, text in generated().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"made {path.relative_to(ROOT)} again")
