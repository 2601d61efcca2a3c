"""Make what is generated in the documents and in conf/ again from the code: `./run docs`.

A document has `<!-- generated: NAME -->` and `<!-- end -->`; what stands between them is replaced. So a new setting,
option, error, command or decision is documented by being there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import report  # noqa: E402
from broker.config import BrokerSettings, TopicSettings  # noqa: E402
from docs.advice import ADVICE  # noqa: E402
from kafkalog.cli.main import kafkalog  # noqa: E402
from kafkalog.client.config import ClientSettings, ConsumerSettings, ProducerSettings  # noqa: E402
from kafkalog.errors import BY_CODE, KafkalogError, RetriableError  # noqa: E402
from pyspark_kafkalog import options  # noqa: E402


def errors() -> str:
    """A table of all errors, by code."""
    rows = ["| code | error | retried | message | what to do |", "| --- | --- | --- | --- | --- |"]
    for code, cls in sorted(BY_CODE.items()):
        retried = "yes" if issubclass(cls, RetriableError) else "no"
        rows.append(f"| {code} | `{cls.__name__}` | {retried} | {_cell(_meaning(cls))} | {_cell(ADVICE[code])} |")
    return "\n".join(rows) + "\n"


def _meaning(cls: type[KafkalogError]) -> str:
    """An error's sentence, and the first paragraph of its own docstring."""
    message = cls.message.replace("`", "").replace("!r}", "}")
    own = (cls.__doc__ or "").split("\n\n")[0] if "__doc__" in cls.__dict__ else ""
    return f"`{message}` {own}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def commands() -> str:
    """The help of every command, the groups' own before their commands'."""
    return "\n".join(_helps(kafkalog, None, "kafkalog"))


def _helps(command: click.Command, parent: click.Context | None, name: str) -> Iterator[str]:
    settings = {**command.context_settings, "terminal_width": 100}
    context = click.Context(command, parent=parent, info_name=name.split()[-1], **settings)
    yield f"{'##' if name.count(' ') < 2 else '###'} {name}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from _helps(found, context, f"{name} {each}")


def decisions() -> str:
    """The decisions, by number."""
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    titles = {page: page.read_text().splitlines()[0].removeprefix("# ") for page in pages}
    return "".join(f"- {page.name[:4]} [{title}]({page.name})\n" for page, title in titles.items())


def _benchmark(name: str) -> str:
    return report.figures_table(report.kept(), name)


PARTS: dict[str, Callable[[], str]] = {
    "broker settings": BrokerSettings.markdown,
    "topic settings": TopicSettings.markdown,
    "client settings": ClientSettings.markdown,
    "producer settings": ProducerSettings.markdown,
    "consumer settings": ConsumerSettings.markdown,
    "spark options": options.markdown,
    "errors": errors,
    "commands": commands,
    "decisions": decisions,
    "benchmark goals": lambda: report.goals_table(report.kept()),
    **{f"plot {name}": partial(report.plot, name) for name in report.PLOTS},
    **{f"benchmark {name}": partial(_benchmark, name) for name in report.PEERS},
}
_PART = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_parts(text: str) -> str:
    """A document with its generated parts made again."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n{part[3]}", text)


def broker_properties() -> str:
    head = "# A broker's settings, each at its default: uncomment what you change. `kafkalog broker --config FILE`.\n"
    return f"{head}\n{BrokerSettings.properties_text()}"


def generated() -> dict[Path, str]:
    """Every file that is made, or has parts that are, with the text that it should have."""
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {path: with_parts(path.read_text()) for path in documents}
    texts[ROOT / "conf" / "broker.properties"] = broker_properties()
    return texts


def main() -> None:
    for path, text in generated().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"made {path.relative_to(ROOT)} again", file=sys.stderr)


if __name__ == "__main__":
    main()
