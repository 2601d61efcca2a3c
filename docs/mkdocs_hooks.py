"""What MkDocs needs beyond mkdocs.yml: pages that stand outside docs/, and links that lead there.

README.md is the site's home. Every other file that a page links to is put into the site under the path that it has in
the checkout. So the same relative links work in both.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(\]\()(?!https?://|#)([^)#\s]+)")
_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def _in_checkout(page: str) -> str:
    """Where a page of the site stands in the checkout."""
    if page == "index.md":
        return "README.md"
    return page if page in _PAGES else f"docs/{page}"


def _in_site(path: str) -> str:
    """Where a file of the checkout stands in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def targets(page: str, text: str) -> list[str]:
    """The files that a page links to, by their paths in the checkout."""
    folder = PurePosixPath(_in_checkout(page)).parent
    return [os.path.normpath(folder / link) for _, link in _LINK.findall(text)]


def on_files(files: Files, config: Any) -> Files:
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for name in _PAGES:
        texts[_in_site(name)] = (ROOT / name).read_text()
        files.append(File.generated(config, _in_site(name), content=texts[_in_site(name)]))
    for page, text in texts.items():
        for path in targets(page, text):
            if not path.startswith("docs/") and (ROOT / path).is_file() and _in_site(path) not in files.src_uris:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page with its links as they have to be in the site."""
    here = page.file.src_uri
    folder = PurePosixPath(_in_checkout(here)).parent

    def link(found: re.Match[str]) -> str:
        path = _in_site(os.path.normpath(folder / found[2]))
        return found[1] + os.path.relpath(path, PurePosixPath(here).parent)

    return _LINK.sub(link, markdown)
