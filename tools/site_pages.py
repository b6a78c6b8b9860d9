"""A hook of MkDocs: pages of the site that lie outside of docs/, and links to them.

Pages link to each other as files of the repository, so that links work there. On the site, a link to one of PAGES leads
to its page; a link to another file of the repository, which the site does not have, becomes that file's name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "cutlass_kernels/src/README.md": "project/source.md",
    "third_party/README.md": "project/third-party.md",
}
RESULTS = sorted((ROOT / "benchmarks").glob("results/**/*.md"))
PAGES |= {str(path.relative_to(ROOT)): f"project/{path.relative_to(ROOT / 'benchmarks')}" for path in RESULTS}
LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\(([^()\s#:]+)(#[^()\s]*)?\)")


def page_of(path: str) -> str | None:
    """The site's name of a file of the repository, if it is there."""
    return path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path)


def translate(markdown: str, path: str, page: str) -> str:
    """The text of ``path`` with the links that its place on the site, ``page``, needs."""

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not (ROOT / file).exists():
            return match[0]  # MkDocs reports it
        to = page_of(file)
        if to is None:
            return f"`{file}`"
        return f"[{text}]({posixpath.relpath(to, posixpath.dirname(page))}{anchor})"

    return LINK.sub(link, markdown)


def on_files(files: Any, config: Any) -> Any:
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    own = {name: path for path, name in PAGES.items()}
    name = page.file.src_uri
    return translate(markdown, own.get(name, f"docs/{name}"), name)
