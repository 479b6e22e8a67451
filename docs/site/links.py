"""Links of the documentation. They are written for a checkout, and have to work on the site as well.

On the site, README.md is the first page, and every other file outside ``docs/`` that a page links to becomes a page
that shows its source. tests/test_docs.py checks all links without building the site.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "docs": "index.md",
    "docs/results": "results/README.md",
}
"""Where files and folders of the repository are on the site, if not at their own path."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^ *(```|~~~)")
_HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)?$")
_NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")


class Link(NamedTuple):
    """A relative link of a page. path: from the root of the repository; "" for the page itself."""

    page: str
    text: str
    path: str
    anchor: str

    @property
    def target(self) -> str:
        """The file that it leads to, from the root of the repository."""
        return self.path or self.page


def slug(heading: str, _separator: str = "-") -> str:
    """The anchor of a heading, by GitHub's rules, so that links to it work in both places."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def prose(markdown: str) -> Iterator[str]:
    """Its lines, with "" for those of code blocks."""
    inside = ""
    for line in markdown.split("\n"):
        fence = _FENCE.match(line)
        if fence and inside in ("", fence[1]):
            inside = "" if inside else fence[1]
            yield ""
        else:
            yield "" if inside else line


def anchors(markdown: str) -> set[str]:
    """The anchors of all headings."""
    return {slug(found[1]) for line in prose(markdown) if (found := _HEADING.match(line))}


def _link(page: str, text: str, target: str) -> Link | None:
    if re.match(r"[a-z]+:", target):
        return None
    path, _, anchor = target.partition("#")
    return Link(page, text, posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else "", anchor)


def links(page: str, markdown: str) -> list[Link]:
    """The relative links and pictures of a page. page: its path from the root of the repository."""
    text = "\n".join(prose(markdown))
    found = [_link(page, match[2], match[3]) for match in _LINK.finditer(text)]
    inner = [
        _link(page, *pair)
        for match in _LINK.finditer(text)
        for pair in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", match[2])
    ]
    return [link for link in found + inner if link is not None]


def line_of(source: str, name: str) -> int | None:
    """The line on which Python source defines a name, such as ``Run.load``; None where it does not."""
    scope: list[ast.stmt] = ast.parse(source).body
    line = None
    for part in name.split("."):
        for node in scope:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part:
                line, scope = node.lineno, node.body
                break
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == part for target in targets):
                line, scope = node.lineno, []
                break
        else:
            return None
    return line


def problem(link: Link) -> str | None:
    """What is wrong with a link, None where it leads somewhere."""
    target = ROOT / link.target
    if not target.exists():
        return "there is no such file"
    if target.suffix == ".md":
        return (
            f"there is no heading #{link.anchor}"
            if link.anchor and link.anchor not in anchors(target.read_text())
            else None
        )
    if target.suffix == ".py" and (name := _name_in(link)) and line_of(target.read_text(), name) is None:
        return f"it does not define {name}"
    return None


def _name_in(link: Link) -> str | None:
    """The name of the function or class that a link to a Python file shows as its text."""
    found = _NAME.fullmatch(link.text)
    return found[1] if found and not found[1].endswith(".py") else None


def is_source(link: Link) -> bool:
    """Whether a link leads to a file that is no page and no picture, so that the site shows its source."""
    return link.target not in PAGES and not link.target.startswith("docs/") and (ROOT / link.target).is_file()


def on_site(link: Link) -> str | None:
    """The page of the site that a link leads to, with its anchor; None for a folder: only its name is shown."""
    anchor = f"#{link.anchor}" if link.anchor else ""
    if link.target in PAGES:
        return PAGES[link.target] + anchor
    if is_source(link):
        if (name := _name_in(link)) and link.target.endswith(".py"):
            anchor = f"#L{line_of((ROOT / link.target).read_text(), name) or 1}"
        return f"source/{link.target}.md" + re.sub("#L([0-9]+).*", r"#L-\1", anchor)
    if (ROOT / link.target).is_dir():
        return None
    return link.target.removeprefix("docs/") + anchor


def for_site(page: str, markdown: str) -> str:
    """A page with its links as the site needs them. page: its path from the root of the repository."""
    here = posixpath.dirname(PAGES.get(page, page.removeprefix("docs/")))

    def moved(match: re.Match[str]) -> str:
        text = _LINK.sub(moved, match[2])
        link = _link(page, match[2], match[3])
        if link is None or not link.path:
            return f"{match[1]}[{text}]({match[3]})"
        target = on_site(link)
        return f"{match[1]}[{text}]({posixpath.relpath(target, here or '.')})" if target is not None else text

    lines = markdown.split("\n")
    kept = list(prose(markdown))
    result, start = [], 0
    for index in range(len(lines) + 1):  # links may break over lines, so paragraphs are taken as a whole
        if index == len(lines) or kept[index] != lines[index]:
            result.append(_LINK.sub(moved, "\n".join(lines[start:index])) if index > start else None)
            result.append(lines[index] if index < len(lines) else None)
            start = index + 1
    return "\n".join(part for part in result if part is not None)
