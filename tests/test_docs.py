"""The docs tell the truth of the code: every `path`, `file:name`, link and command that they print exists, and their
Python compiles."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pyspark
import pytest

from kafkalog.cli.main import kafkalog

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_REFERENCE = re.compile(
    r"`((?:kafkalog|broker|pyspark_kafkalog|tests|proto|conf|examples|bench|docs)/[\w./-]*)(?::([A-Za-z_][\w.]*))?`"
)


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def faults(text: str) -> list[str]:
    found = []
    for path, name in _REFERENCE.findall(text):
        if not (ROOT / path).exists():
            found.append(f"{path} does not exist")
        elif name and name not in names_in(ROOT / path):
            found.append(f"{path} has no {name}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    assert faults(page.read_text()) == []


_NAME = re.compile(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+|[a-z]+(?:_[a-z]+)+)`")
"""A class such as an error, or an event of a log."""
_OF_TODAY = [page for page in PAGES if page.parent.name != "decisions"]


@pytest.fixture(scope="module")
def words_of_the_code() -> set[str]:
    files = [
        path
        for name in ("kafkalog", "broker", "pyspark_kafkalog", "bench", "tests")
        for path in (ROOT / name).rglob("*.py")
    ]
    return {word for path in files for word in (path.stem, *re.findall(r"\w+", path.read_text()))}


@pytest.mark.parametrize("page", _OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_errors_and_events_that_a_page_names_are_in_the_code(page: Path, words_of_the_code: set[str]) -> None:
    assert set(_NAME.findall(page.read_text())) - words_of_the_code == set()


def test_a_wrong_name_is_found() -> None:
    assert faults("`kafkalog/clock.py:Clock.now_us` and `kafkalog/clock.py:Sundial` and `broker/nowhere.py`") == [
        "kafkalog/clock.py has no Sundial",
        "broker/nowhere.py does not exist",
    ]


def test_the_architecture_names_both_paths() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    assert len([name for _, name in _REFERENCE.findall(page) if name]) > 40


# --- links -------------------------------------------------------------------------------------------------------

_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(text: str) -> set[str]:
    """What links can name in a page: its headings, as GitHub and the site make names of them."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", _FENCED.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for link, anchor in _LINK.findall(_FENCED.sub("", text)):
        target = (page.parent / link).resolve() if link else page
        if link and not (target.is_relative_to(ROOT) and target.exists()):
            dead.append(f"{link} does not exist")
        elif anchor and anchor not in anchors(target.read_text() if link else text):
            dead.append(f"{link or 'the page'} has no #{anchor}")
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page, page.read_text()) == []


def test_a_dead_link_is_found() -> None:
    text = "# One `two`: three\n[a](README.md#try-it) [b](#one-two-three) [c](gone.md) [d](README.md#gone) [e](#two)\n"
    text += "```text\n[f](gone.md)\n# two\n```\n"
    assert dead_links(ROOT / "page.md", text) == [
        "gone.md does not exist",
        "README.md has no #gone",
        "the page has no #two",
    ]


# --- code blocks -------------------------------------------------------------------------------------------------

LANGUAGES = {"python", "sh", "text", "sql", "properties"}
_TASKS = set(re.findall(r"^(\w+)\)", (ROOT / "run").read_text(), re.MULTILINE))
_SHELLS_OWN = {".", "export", "for", "done"}
_PRINTED = re.compile(r"^    ((?:\./run|kafkalog|spark-submit|python|pip|export|for) (?:.*\\\n)*.*)$", re.MULTILINE)
"""A command in an indented block."""


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of every fenced block."""
    return [(language, re.sub(rf"^{indent}", "", code, flags=re.M)) for indent, language, code in _FENCED.findall(text)]


def printed_commands(text: str) -> list[str]:
    """The commands in indented blocks, without what is said of them in a second column."""
    found = _PRINTED.findall(_FENCED.sub("", text))
    return [re.sub(r" {2,}.*", "", re.sub(r"\\\n +", "", command)) for command in found]


def faults_of_python(code: str) -> list[str]:
    try:
        compile(code, "block", "exec")
    except SyntaxError as error:
        return [str(error)]
    return []


def simple_commands(code: str) -> Iterator[list[str]]:
    """The words of every command in some lines of shell."""
    for line in code.replace("\\\n", " ").splitlines():
        parts = shlex.shlex(line, posix=True, punctuation_chars=";|&")
        parts.whitespace_split = True
        words: list[str] = []
        for word in [*parts, ";"]:
            if set(word) <= set(";|&"):
                while words and (words[0] == "do" or re.fullmatch(r"[A-Z_]+=.*", words[0])):
                    del words[0]
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def faults_of_shell(code: str) -> list[str]:
    return [fault for words in simple_commands(code) if (fault := _fault_of_command(*words)) is not None]


def _fault_of_command(program: str, *words: str) -> str | None:
    if program == "kafkalog":
        return _fault_of_kafkalog(words)
    if program == "./run":
        return None if words[0] in _TASKS else f"./run has no task {words[0]}"
    if program == "spark-submit":
        missing = [word for word in words if word.endswith((".py", ".conf")) and not (ROOT / word).exists()]
        return f"{missing[0]} does not exist" if missing else None
    if program == "python" and words[:1] == ("-m",):
        return None if importlib.util.find_spec(words[1]) else f"there is no module {words[1]}"
    if program.startswith("$SPARK_HOME/"):
        script = Path(pyspark.__path__[0], program.removeprefix("$SPARK_HOME/"))
        return None if script.exists() else f"Spark has no {script.name}"
    return None if program in _SHELLS_OWN or shutil.which(program) else f"there is no command {program}"


def _fault_of_kafkalog(words: tuple[str, ...]) -> str | None:
    command: click.Command = kafkalog
    context: click.Context | None = None
    rest = list(words)
    try:
        while True:
            context = click.Context(command, parent=context, info_name=command.name, **command.context_settings)
            _, rest, _ = command.make_parser(context).parse_args(args=rest)
            if not isinstance(command, click.Group):
                return None
            name, *rest = rest
            found = command.get_command(context, name)
            if found is None:
                return f"{context.command_path} has no command {name}"
            command = found
    except click.UsageError as error:
        return f"{' '.join(words)}: {error.message}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_are_code(page: Path) -> None:
    text = page.read_text()
    for language, code in blocks(text):
        assert language in LANGUAGES, code
        assert language != "python" or faults_of_python(code) == []
        assert language != "sh" or faults_of_shell(code) == []
    assert faults_of_shell("\n".join(printed_commands(text))) == []


def test_wrong_code_is_found() -> None:
    assert faults_of_python("def f(:\n") != []
    assert faults_of_shell("A=1 kafkalog topics list | nosuchprogram x") == ["there is no command nosuchprogram"]
    assert faults_of_shell("kafkalog topics lst && ./run tets; python -m examples.gone") == [
        "kafkalog topics has no command lst",
        "./run has no task tets",
        "there is no module examples.gone",
    ]
    [fault] = faults_of_shell("kafkalog groups reset g \\\n  --too earliest")
    assert "--too" in fault
    printed = printed_commands("    kafkalog a \\\n        b\n    # c\n    ./run x      does this; and that\n")
    assert printed == ["kafkalog a b", "./run x"]
