"""The report of a run as one HTML file that needs no other file and no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from dynaquant.engine.quantize.knobs import in_short, knobs_to_json
from dynaquant.formatting import NONE, in_bytes, in_seconds, percent, plural, times
from dynaquant.report.charts import Chart, charts
from dynaquant.report.figures import javascript
from dynaquant.report.statistics import Row, Statistics, statistics_of
from dynaquant.search.scores import number_to_json
from dynaquant.store.atomic_files import atomic_file
from dynaquant.store.chain import retry_if_run_changed
from dynaquant.store.container import CheckpointFile
from dynaquant.store.run import Run

COLUMNS = (
    "step",
    "tags",
    "parent",
    "bytes stored",
    "raw",
    "ratio",
    "weights stored",
    "raw",
    "ratio",
    "degradation",
    "limit",
    "configuration",
    "found by",
    "scored",
    "seconds",
)


def write_report(
    run: Run,
    out: Path,
    with_progress: Callable[[list[CheckpointFile]], Iterable[CheckpointFile]] = iter,
) -> Statistics:
    """Write the report of a run to the file ``out``, which is replaced if it exists, and return the statistics.

    with_progress: iterates over the files as they are read.

    Raises CheckpointError if the run has no checkpoint with a valid record, OSError if ``out`` cannot be written.
    """

    def read() -> Statistics:
        files, broken = run.files()
        return statistics_of(run, with_progress(files), broken)

    statistics = retry_if_run_changed(read)
    with atomic_file(out) as file:
        file.write(page_of(statistics).encode("utf-8", errors="replace"))
    return statistics


def page_of(statistics: Statistics) -> str:
    """Return the whole page as HTML."""
    drawn = charts(statistics)
    figures = {chart.key: chart.figure.to_json(engine="json") for chart in drawn if chart.figure is not None}
    body = [
        f"<h1>{escape(statistics.name)}</h1>",
        f'<p class="muted">{escape(_subtitle(statistics))}</p>',
        _facts(statistics),
        _list("Skipped", statistics.skipped, "warn"),
        '<div class="grid">',
        *map(_section, drawn),
        "</div>",
        _table(statistics),
        _list("Notes", [f"step {row.record.step}: {note}" for row in statistics.rows for note in row.record.notes]),
        f"<footer>dynaquant {version('dynaquant')}; for programs: <code>dynaquant log --json</code></footer>",
    ]
    return Template(_part("page.html")).substitute(
        title=escape(f"{statistics.name} – dynaquant"),
        style=_part("page.css"),
        body="\n".join(body),
        plotly=javascript(),
        # plotly escapes < and /, so that no name can end the script element around the figures.
        figures="{" + ",".join(f'"{key}":{figure}' for key, figure in figures.items()) + "}",
        script=_part("page.js"),
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _subtitle(statistics: Statistics) -> str:
    steps = [row.record.step for row in statistics.by_step]
    span = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
    return f"{plural(len(steps), 'checkpoint')}, {span}"


def _facts(statistics: Statistics) -> str:
    whole, weights = statistics.whole, statistics.weights
    copy = f", and {in_bytes(statistics.lossless_copy)} for the lossless copy" if statistics.lossless_copy else ""
    detail = f"{in_bytes(whole.stored)} instead of {in_bytes(whole.raw)}{copy}"
    facts = [("Whole state", times(whole.ratio, 1), detail)]
    if weights.raw:
        detail = f"{in_bytes(weights.stored)} instead of {in_bytes(weights.raw)}"
        facts.append(("Weights", times(weights.ratio, 1), detail))
    limits = {row.record.limit for row in statistics.rows if row.record.limit is not None}
    if len(limits) > 1:
        allowed = f"limit of a checkpoint: {percent(min(limits))} to {percent(max(limits))}"
    else:
        allowed = f"limit {percent(max(limits))} for each checkpoint" if limits else "of one checkpoint"
    if statistics.worst is None:
        measured = any(row.record.degradation is not None for row in statistics.rows)
        blind = any(row.record.quality for row in statistics.rows)
        why = "not finite" if measured else "the metric sees nothing" if blind else "no metric was given"
        facts.append(("Largest degradation", NONE, why))
    else:
        facts.append(("Largest degradation", percent(statistics.worst, sign=True), allowed))
    seconds, scored = sum(statistics.seconds.values()), sum(row.record.evaluations for row in statistics.rows)
    spent = [row.record.equivalents for row in statistics.rows if row.record.equivalents]
    evaluations = f" in {sum(spent):.0f} evaluations" if spent else ""
    facts.append(("Training waited", in_seconds(seconds), f"{plural(scored, 'configuration')} scored{evaluations}"))
    costs = [row.restore for row in statistics.rows if row.restore is not None]
    if costs:
        most = max(costs, key=lambda cost: cost.size)
        detail = f"read by the largest restore, from {plural(most.files, 'file')}"
        facts.append(("Restore", in_bytes(most.size), detail))
    cards = (
        f'<div><dt>{label}</dt><dd class="number">{number}</dd><dd class="detail">{detail}</dd></div>'
        for label, number, detail in facts
    )
    return f'<dl class="facts">{"".join(cards)}</dl>'


def _section(chart: Chart) -> str:
    place = "" if chart.figure is None else f'<div class="chart" id="{chart.key}"></div>'
    if place and chart.width == "scrolled":
        place = f'<div class="scroll">{place}</div>'
    kind = "" if chart.width == "half" else ' class="wide"'
    return f"<section{kind}><h2>{escape(chart.title)}</h2><p>{escape(chart.text)}</p>{place}</section>"


def _table(statistics: Statistics) -> str:
    left = {"tags", "configuration", "found by"}
    head = "".join(f'<th class="left">{name}</th>' if name in left else f"<th>{name}</th>" for name in COLUMNS)
    rows = "".join(f"<tr>{''.join(_cells(row))}</tr>" for row in statistics.rows)
    return (
        '<section class="long"><h2>All checkpoints</h2><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _cells(row: Row) -> Iterator[str]:
    record = row.record
    weights, chosen = record.roles.get("weight"), record.configuration
    loss = record.degradation
    yield _cell("step", record.step, f"{record.step:,}")
    yield _cell("tags", row.tags, ", ".join(row.tags), "left")
    yield _cell("parent", record.parent, "keyframe" if record.parent is None else f"{record.parent:,}")
    yield _cell("total.stored", record.total.stored, f"{record.total.stored:,}")
    yield _cell("total.raw", record.total.raw, f"{record.total.raw:,}")
    yield f"<td>{times(record.ratio)}</td>"
    yield _cell("roles.weight.stored", weights and weights.stored, f"{weights.stored:,}" if weights else NONE)
    yield _cell("roles.weight.raw", weights and weights.raw, f"{weights.raw:,}" if weights else NONE)
    yield f"<td>{times(weights.ratio, 1) if weights else NONE}</td>"
    yield _cell("quality.degradation", number_to_json(loss), percent(loss, sign=True))
    yield _cell("limit", number_to_json(record.limit), percent(record.limit))
    yield _cell("configuration", knobs_to_json(chosen), in_short(chosen) if chosen else "exact", "left")
    yield _cell("search", record.search, record.search or NONE, "left")
    yield f"<td>{record.evaluations}</td>"
    yield f"<td>{sum(record.seconds.values()):.2f}</td>"


def _cell(field: str, value: Any, text: str, kind: str = "") -> str:
    """Return a table cell: a text for people; for programs the exact value and its key in ``log --json``."""
    full = escape(json.dumps(value))
    return f'<td class="{kind}"><data data-field="{field}" value="{full}">{escape(text)}</data></td>'


def _list(title: str, items: Iterable[str], kind: str = "") -> str:
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<section class="long {kind}"><h2>{title}</h2><ul>{listed}</ul></section>' if listed else ""
