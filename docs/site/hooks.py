"""What MkDocs calls while it builds the site: pages that are generated, and links as the site needs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import links
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

API = {
    "A training": ["Checkpointer", "LossOn", "OnBatches", "Gradients"],
    "Options": ["Quality", "Auto", "Moved", "Keep"],
    "What is stored": ["Bound", "save", "load", "load_into", "follow"],
    "What a save reports": ["Record"],
    "Configurations": ["GridConfiguration", "Configuration"],
    "Errors": ["DynaquantError", "CheckpointError", "StateError", "EvaluateError"],
}
"""The public names in the order of the page, by heading."""

TYPES = [
    "checkpointer.Optimizers",
    "search.evaluation.Evaluate",
    "options.QualityName",
    "options.Every",
    "options.Deprecated",
    "engine.quantize.knobs.MethodName",
    "engine.quantize.knobs.Knobs",
    "saving.log_to.LogTo",
    "saving.record.Size",
    "search.scores.MeasuredQuality",
    "search.scores.Trial",
    "interop.packing.Metric",
    "restore.stored_checkpoint.PathOrFile",
    "restore.stored_checkpoint.Parents",
    "restore.model_tensors.Models",
    "restore.follow.Follower",
]
"""Types that the public names' signatures refer to."""


def on_config(config: MkDocsConfig) -> None:
    """Give headings the anchors that they have on GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = links.slug


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the pages that are not in docs/: README and its like, references, sources that pages link to."""
    sources = {path.relative_to(links.ROOT).as_posix(): path for path in Path(config.docs_dir).glob("**/*.md")}
    for path, page in links.PAGES.items():
        if path.endswith(".md"):
            sources[path] = links.ROOT / path
            files.append(File.generated(config, page, content=sources[path].read_text()))
    files.append(File.generated(config, "api.md", content=_api()))
    files.append(File.generated(config, "cli.md", content=_commands()))
    found = {
        link.target
        for path, text in sources.items()
        for link in links.links(path, text.read_text())
        if links.is_source(link)
    }
    for path in sorted(found):
        page = File.generated(config, f"source/{path}.md", content=_source(path))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turn links to files of the repository into links within the site."""
    where = {page: path for path, page in links.PAGES.items() if path.endswith(".md")}
    return links.for_site(where.get(page.file.src_uri, f"docs/{page.file.src_uri}"), markdown)


def _source(path: str) -> str:
    """A page that shows a file, with an anchor for every line. HTML, as MkDocs checks only the anchors that it sees."""
    text = (links.ROOT / path).read_text()
    try:
        lexer = get_lexer_for_filename(path)
    except ClassNotFound:
        lexer = TextLexer()
    shown = highlight(text, lexer, HtmlFormatter(linenos="table", lineanchors="L", anchorlinenos=True, wrapcode=True))
    return f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n# {path}\n\n{shown}\n"


def _api() -> str:
    """The page of the public names; mkdocstrings fills it in."""
    import dynaquant  # noqa: PLC0415  (a page of the site without an installed package still builds)

    if differs := {name for names in API.values() for name in names} ^ set(dynaquant.__all__):
        raise PluginError(f"docs/site/hooks.py and dynaquant.__all__ differ in {', '.join(sorted(differs))}")
    parts = ["# API reference", "All names are imported from `dynaquant`. Everything else is internal and may change."]
    for heading, names in API.items():
        parts += [f"## {heading}", *(f"::: dynaquant.{name}" for name in names)]
    parts += ["## Types in signatures", *(f"::: dynaquant.{name}" for name in TYPES)]
    return "\n\n".join(parts) + "\n"


def _commands() -> str:
    """The page of the commands, from their own help."""
    command = [sys.executable, "-m", "typer", "dynaquant.cli", "utils", "docs", "--name", "dynaquant"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = re.sub(r"^# .*", "# Command line", text)
    # The list of commands: with the whole first paragraph of each, which Typer cuts, and a link.
    about = dict(re.findall(r"^## `dynaquant (\S+)`\n\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL))
    listed = (
        f"- [`{name}`](#{links.slug(f'dynaquant {name}')}): {' '.join(summary.split())}"
        for name, summary in about.items()
    )
    text = re.sub(r"(?<=\*\*Commands\*\*:\n\n)(\* .*\n)+", lambda _: "\n".join(listed) + "\n", text)
    text = re.sub(r"^\*\*Usage\*\*:\n\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^Example: (.*)$", r"Example: `\1`", text, flags=re.MULTILINE)
    return re.sub(r"^\*\*(Arguments|Options)\*\*:\n\n((?:\* .*\n)+)", _table, text, flags=re.MULTILINE)


def _table(found: re.Match[str]) -> str:
    """Arguments or options as a table. Typer lists each as "* `--out <path>`: What it is.  [default: demo]"."""
    rows = re.findall(r"^\* `(.*?)`: (.*?)(?:  \[([^\[]*)\])?$", found[2], re.MULTILINE)
    cells = [[f"`{name}`", about, note] for name, about, note in rows]
    lines = [f"| {found[1]} | | |", "|---|---|---|"]
    return (
        "\n".join(lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]) + "\n"
    )
